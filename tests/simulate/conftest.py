"""A model on devices that are formulas, and one that takes a second for each token."""

from collections.abc import Callable
from functools import cache

import pytest

from jaxllm.simulate.call import Subject, find_subject


@pytest.fixture(scope="session")
def subject() -> Callable[[str], Subject]:
    """Gives the 8B shape on some devices."""
    return cache(lambda devices: find_subject("llama-3.1-8b", devices))
