"""`jaxllm collect-env`: what a report of a defect should say of the machine. Knows where to look; never fails.

Of secrets it tells only whether they are set.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxllm import __version__
from jaxllm.options import OptionParser

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers", "safetensors", "triton")
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-nccl-cu13")
_SECRETS = ("HF_TOKEN", "OPENAI_API_KEY")
_PREFIXES = ("JAX_", "XLA_", "NCCL_", "JAXLLM_")
_NAMES = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "NPROC")
_WORDS_OF_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_GIB = 2**30


def add_flags(parser: OptionParser) -> None:
    """Adds nothing: there is nothing to choose."""


def run(values: dict[str, Any]) -> int:
    """Prints the table; gives the exit code."""
    for label, value in rows():
        print(f"{label:22} {value}", flush=True)
    return 0


def rows() -> Iterator[tuple[str, str]]:
    """Yields labels and values; what cannot be found out has a value that says so."""
    environment = list(_environment())  # as it was before we looked for devices
    yield "jaxllm", __version__
    yield "python", f"{platform.python_version()} at {sys.executable}"
    yield "system", _told(lambda: f"{_distribution()}, {platform.system()} {platform.release()} {platform.machine()}")
    yield "cpu", _told(_cpu)
    yield "memory", _told(_memory)
    for package in _PACKAGES:
        yield package, _version(package) or "not installed"
    plugins = [f"{package} {version}" for package in _PLUGINS if (version := _version(package))]
    yield "CUDA packages", ", ".join(plugins) or "none installed"
    yield "driver", _told(_driver)
    yield from _devices()
    yield from environment


def _told(find: Callable[[], str]) -> str:
    """What a look gives, or why it gives nothing."""
    try:
        return find()
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"not available: {type(error).__name__}{f': {lines[0]}' if lines else ''}"


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown distribution")
    except OSError:
        return "unknown distribution"


def _cpu() -> str:
    usable = f", {len(os.sched_getaffinity(0))} usable" if hasattr(os, "sched_getaffinity") else ""
    return f"{_cpu_name()}, {os.cpu_count()} cores{usable}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return f"{total / _GIB:.1f} GiB, {available / _GIB:.1f} GiB of it unused"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no nvidia-smi here"
    query = "--query-gpu=driver_version,name,memory.total,memory.used"
    done = subprocess.run(
        [program, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=False
    )
    said = " ; ".join((done.stdout or done.stderr).strip().splitlines())
    return said if done.returncode == 0 else f"nvidia-smi failed: {said}"


def _devices() -> Iterator[tuple[str, str]]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # to look, no memory is needed
    try:
        import jax

        devices = jax.devices()
    except Exception as error:
        yield "devices", _failure(error)
        return
    yield "devices", f"{len(devices)} of platform {devices[0].platform}"
    for device in devices:
        yield f"device {device.id}", _told(lambda device=device: f"{device.device_kind}{_device_memory(device)}")


def _device_memory(device: Any) -> str:
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return f", {limit / _GIB:.1f} GiB for jax" if limit else ", memory not told"


def _environment() -> Iterator[tuple[str, str]]:
    for name in _SECRETS:
        yield name, "set" if os.environ.get(name) else "not set"
    for name in sorted(os.environ):
        if name in _SECRETS or not (name in _NAMES or name.startswith(_PREFIXES)):
            continue
        is_secret = any(word in name for word in _WORDS_OF_SECRETS)
        yield name, "set" if is_secret else os.environ[name]
