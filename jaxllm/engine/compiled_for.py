"""What an engine's programs depend on, as names and texts. Knows where each fact is found; compares and stores none."""

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path

import jax

from jaxllm.engine.step import StepProgram
from jaxllm.engine.step_compiler import SamplerSettings

_PACKAGES = ("jaxllm", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "triton", "flax")
_SOURCES = ("engine", "kernels", "mesh", "models")  # whose text decides what is compiled


def compiled_for(program: StepProgram, num_blocks: int, num_rows: int, settings: SamplerSettings) -> dict[str, str]:
    """Lists all facts: programs may be exchanged between engines that agree in every one."""
    device = program.mesh.devices.flat[0]
    return {
        "model": _digest(repr((program.decoder.cfg, program.decoder.params, program.decoder.loop)).encode()),
        "dtype": program.decoder.cfg.dtype,
        "KV cache": program.kv_dtype.name,
        "block size": str(program.block_size),
        "blocks": str(num_blocks),
        "max_num_seqs": str(num_rows),
        "mesh": str(dict(program.mesh.shape)),
        "axis rules": repr(program.rules),
        "captured collectives": str(program.capture_collectives),
        "logprobs_mode": settings.logprobs_mode,
        "device": device.device_kind if device.platform != "cpu" else f"{device.device_kind} {_processor()}",
        "source": _source_digest(),
        **{f"kernel {name}": _place(kernel) for name, kernel in program.kernels._asdict().items()},
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "x64": str(jax.config.jax_enable_x64),
        **{package: _version(package) for package in _PACKAGES},
    }


def _place(kernel) -> str:
    return f"{getattr(kernel, '__module__', '')}.{getattr(kernel, '__qualname__', repr(kernel))}"


def _processor() -> str:
    """A CPU's programs use the instructions of the CPU that they were compiled on."""
    try:
        with open("/proc/cpuinfo") as lines:
            return _digest(next(line for line in lines if line.startswith(("flags", "Features"))).encode())
    except (OSError, StopIteration):
        return platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _source_digest() -> str:
    """Of our own source, so that a change of a model or a kernel during development is one of the facts."""
    digest, root = hashlib.blake2b(digest_size=12), Path(__file__).parents[1]
    for folder in _SOURCES:
        top = (root / folder).resolve()
        for path in sorted(top.rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(f"{folder}/{path.relative_to(top)}".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()
