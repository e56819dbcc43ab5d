"""A jax profiler trace of this process, and the names that mark the parts of a step in it. Knows no engine."""

from contextlib import AbstractContextManager, nullcontext

import jax

from jaxllm.config.errors import InputError

PREFIX = "jaxllm:"  # of the names of spans, so that whoever reads a trace finds them
PHASES = ("schedule", "build", "execute", "wait", "update")  # "execute" has the step's shape behind it


_NO_SPAN = nullcontext()


class Spans:
    """Marks what the host does while a trace is taken; costs nothing worth measuring while none is."""

    def __init__(self) -> None:
        self.is_on = False

    def __call__(self, name: str, shape: object = None) -> AbstractContextManager:
        """Gives a span to be entered; the shape, if there is one, stands behind the name."""
        if not self.is_on:
            return _NO_SPAN
        return jax.profiler.TraceAnnotation(PREFIX + name if shape is None else f"{PREFIX}{name} {shape}")


def start_trace(directory: str, python_calls: bool = True) -> None:
    """Begins a trace that is written below the directory when it ends.

    Without `python_calls` it slows the host far less, and has the spans and what jax and XLA record themselves.

    Raises:
        InputError: one is under way already, or the directory cannot be used.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = int(python_calls)
    try:
        jax.profiler.start_trace(directory, profiler_options=options)
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
