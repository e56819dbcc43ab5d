"""What jax and XLA read from the process's environment at import. Knows names and defaults; imports neither."""

from collections.abc import MutableMapping
from pathlib import Path


def prepare_environment(environment: MutableMapping[str, str], *, has_store: bool = False) -> None:
    """Sets what the user has not set. Only the command line calls this, before the first import of jax.

    With an executable store jax's own cache stays off: it would hand out programs that cannot be stored.
    """
    cache_home = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    defaults = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",  # of the GPU; the engine divides it, jax's own default is 0.75
        "JAX_COMPILATION_CACHE_DIR": str(Path(cache_home) / "jaxllm" / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "TF_CPP_MIN_LOG_LEVEL": "2",  # XLA's warnings mean little to who serves; its errors stay
        "TOKENIZERS_PARALLELISM": "true",
    }
    if has_store:
        del defaults["JAX_COMPILATION_CACHE_DIR"]
    for name, value in defaults.items():
        environment.setdefault(name, value)


def offer_virtual_devices(environment: MutableMapping[str, str], count: int) -> None:
    """Has jax make so many devices of a CPU, unless the user's XLA_FLAGS say how many. GPUs stay what they are."""
    flags, name = environment.get("XLA_FLAGS", ""), "xla_force_host_platform_device_count"
    if name not in flags and count > 1:
        environment["XLA_FLAGS"] = f"{flags} --{name}={count}".strip()
        environment.setdefault("NPROC", "32")  # fewer threads than devices need would end the process


def keep_command_buffers(environment: MutableMapping[str, str]) -> None:
    """Has XLA keep its command buffers (CUDA graphs) under the profiler, unless the user's XLA_FLAGS name them."""
    flags, name = environment.get("XLA_FLAGS", ""), "xla_enable_command_buffers_during_profiling"
    if name not in flags:
        environment["XLA_FLAGS"] = f"{flags} --{name}=true".strip()
