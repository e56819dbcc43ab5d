"""`8xA100-80G`, or a file -> how many of which device. Knows the descriptions in mesh/devices; measures nothing."""

import re
from importlib import resources
from pathlib import Path

from jaxllm.config.errors import InputError
from jaxllm.mesh.cost_model import DeviceSpec, read_device

_COUNTED = re.compile(r"(?:(\d+)\s*[x*×])?\s*(\S+)")


def device_names() -> list[str]:
    """Lists the devices that are described."""
    files = (resources.files("jaxllm") / "mesh" / "devices").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def find_devices(named: str, file: str | None = None) -> tuple[int, DeviceSpec]:
    """Reads `2xH200` or `H200`; with a file the device is the one that it describes, and `8` alone will do.

    Raises:
        InputError: the number is none, or the device is not known or not described right.
    """
    if file is not None and named.strip().isdecimal():
        named += "x-"
    match = _COUNTED.fullmatch(named.strip())
    if match is None or int(match[1] or 1) < 1:
        raise InputError(f"devices={named!r} is not understood: write a number and a device, such as 8xA100-80G")
    count = int(match[1] or 1)
    return count, _from_file(file) if file is not None else _known(match[2])


def _known(name: str) -> DeviceSpec:
    names = device_names()
    found = [known for known in names if known in (name.lower(), f"{name.lower()}-80g")]
    if not found:
        known = ", ".join(n.upper() for n in names)
        raise InputError(f"devices: {name!r} is not described; there are {known}, or describe it in a device_file")
    return read_device((resources.files("jaxllm") / "mesh" / "devices" / f"{found[0]}.json").read_text())


def _from_file(file: str) -> DeviceSpec:
    try:
        return read_device(Path(file).expanduser().read_text())
    except OSError as error:
        raise InputError(f"device_file={file!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"device_file={file!r} describes no device: {error}") from None
