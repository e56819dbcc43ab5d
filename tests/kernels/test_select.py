import inspect
import logging

import pytest

from jaxllm.kernels import select as select_module
from jaxllm.kernels.select import VERSIONS, Version, select


def test_every_operation_has_a_version_for_any_platform_with_a_callable_of_its_name():
    for operation in VERSIONS:
        for platform in ("cpu", "gpu"):
            function = select(operation, platform=platform)
            assert callable(function)
            assert function.__name__ == operation


def test_all_versions_of_an_operation_take_the_arguments_of_the_reference():
    for operation, versions in VERSIONS.items():
        reference = inspect.signature(select(operation, platform="cpu", preferred="reference"))
        for version in versions:
            platform = version.platforms[0] or "cpu"
            found = inspect.signature(select(operation, platform=platform, preferred=version.name))
            assert list(found.parameters) == list(reference.parameters)


def test_the_choice_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        select("rms_norm", platform="cpu")
    assert "rms_norm: reference" in caplog.text


def test_the_first_version_that_runs_on_the_platform_is_taken(monkeypatch):
    fast = Version("fast", "math", ("gpu",))
    slow = Version("slow", "cmath")
    monkeypatch.setitem(select_module.VERSIONS, "sqrt", (fast, slow))
    assert select("sqrt", platform="gpu").__module__ == "math"
    assert select("sqrt", platform="cpu").__module__ == "cmath"
    assert select("sqrt", platform="gpu", preferred="slow").__module__ == "cmath"


def test_a_version_that_does_not_run_here_is_refused_with_those_that_do(monkeypatch):
    monkeypatch.setitem(select_module.VERSIONS, "sqrt", (Version("fast", "math", ("gpu",)), Version("slow", "cmath")))
    with pytest.raises(ValueError, match="sqrt: no version 'fast' on cpu; choose one of auto, slow"):
        select("sqrt", platform="cpu", preferred="fast")
    with pytest.raises(ValueError, match="sqrt: no version 'flash' on gpu; choose one of auto, fast, slow"):
        select("sqrt", platform="gpu", preferred="flash")
