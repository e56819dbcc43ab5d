"""A jax profiler trace of this process, begun and ended. Knows no engine."""

import jax

from jaxllm.config.errors import InputError


def start_trace(directory: str) -> None:
    """Begins a trace that is written below the directory when it ends.

    Raises:
        InputError: one is under way already, or the directory cannot be used.
    """
    try:
        jax.profiler.start_trace(directory)
    except (RuntimeError, OSError) as error:
        raise InputError(f"start_profile: {str(error).splitlines()[0]}") from None


def stop_trace() -> None:
    """Ends the trace and writes it.

    Raises:
        InputError: none is under way.
    """
    try:
        jax.profiler.stop_trace()
    except RuntimeError as error:
        raise InputError(f"stop_profile: {str(error).splitlines()[0]}") from None
