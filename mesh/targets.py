"""GPUs to compile for where there is none: their devices exist in name, can be compiled for, and run nothing.

XLA wants to know a GPU's units and sizes, which are CUDA's device properties of the card. Knows cards; no models.
"""

import functools
from collections.abc import Sequence
from importlib import resources

from jax.experimental.topologies import get_topology_desc
from jaxlib._jax import Device

# Of the memory that CUDA reports, the share that jax takes by default in our command line.
_TAKEN = 0.95


def target_names() -> list[str]:
    """Lists the cards that programs can be compiled for without having one."""
    files = (resources.files("jaxllm") / "mesh").iterdir()
    return sorted(file.name.removesuffix(".txtpb") for file in files if file.name.endswith(".txtpb"))


@functools.cache
def target_devices(name: str, count: int = 1) -> Sequence[Device]:
    """Gives devices of a card.

    Raises:
        ValueError: the card is not known, or jax's CUDA plugin is not installed.
    """
    if name not in target_names():
        raise ValueError(f"there is no description of {name!r}; there are: {', '.join(target_names())}")
    try:
        topology = get_topology_desc(platform="cuda", target_config=_described(name), topology=f"1x1x{count}")
    except NotImplementedError:
        raise ValueError(f"compiling for {name!r} needs jax's CUDA plugin: install jax[cuda13]") from None
    return topology.devices


def is_compile_only(device: Device) -> bool:
    """Tells a device that exists in name only."""
    return type(getattr(device, "client", None)).__name__ == "CompileOnlyPyClient"


def memory_of(device: Device) -> int:
    """Bytes that a process would have on such a card."""
    for name in target_names():
        lines = _described(name).splitlines()
        if any(line.strip() == f'name: "{device.device_kind}"' for line in lines):
            size = next(line for line in lines if line.strip().startswith("device_memory_size:"))
            return int(int(size.split(":")[1]) * _TAKEN)
    return 0


def _described(name: str) -> str:
    return (resources.files("jaxllm") / "mesh" / f"{name}.txtpb").read_text()
