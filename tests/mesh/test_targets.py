from importlib.util import find_spec
from types import SimpleNamespace

import jax
import pytest

from jaxllm.mesh.targets import is_compile_only, memory_of, target_devices, target_names


def test_the_cards_that_can_be_compiled_for_are_named():
    assert target_names() == ["h200"]
    with pytest.raises(ValueError, match="no description of 'h300'; there are: h200"):
        target_devices("h300")


def test_a_cards_memory_is_what_a_process_takes_of_it():
    assert 132 < memory_of(SimpleNamespace(device_kind="NVIDIA H200")) / 2**30 < 133.5  # pyright: ignore[reportArgumentType]
    assert memory_of(SimpleNamespace(device_kind="another")) == 0  # pyright: ignore[reportArgumentType]


def test_a_device_that_is_here_is_more_than_a_name():
    assert not is_compile_only(jax.devices()[0])


@pytest.mark.skipif(find_spec("jax_plugins") is not None, reason="jax's CUDA plugin is installed here")
def test_without_jaxs_plugin_it_is_named():
    with pytest.raises(ValueError, match="needs jax's CUDA plugin"):
        target_devices("h200")
