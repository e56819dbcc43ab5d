"""What can be measured: an engine that takes requests at once and gives back a Run. Knows no engine."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxllm.bench.figures import Run
from jaxllm.bench.workloads import WorkloadRequest, folded
from jaxllm.config.errors import InputError

Progress = Callable[[int], object]  # so many requests more have ended


class Subject(Protocol):
    """An engine under measurement."""

    name: str

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    def facts(self) -> dict[str, Any]:
        """Tells what is measured and on what."""
        ...

    def warm_up(self, requests: Sequence[WorkloadRequest], progress: Progress) -> None:
        """Brings about everything that must not be measured, compilations above all."""
        ...

    def run(self, requests: Sequence[WorkloadRequest], progress: Progress) -> Run:
        """Generates exactly output_len tokens for each request, greedy."""
        ...

    def close(self) -> None:
        """Gives the device's memory back."""
        ...


def requests_for(subject: Subject, workload: str, requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """Brings token ids into the subject's vocabulary, and refuses requests that it would cut short.

    Raises:
        InputError: a request is longer than the subject takes.
    """
    _check_lengths(workload, requests, subject.max_model_len)
    return folded(requests, subject.vocab_size)


def _check_lengths(workload: str, requests: Sequence[WorkloadRequest], max_model_len: int) -> None:
    longest = max(requests, key=lambda request: len(request.prompt) + request.output_len)
    total = len(longest.prompt) + longest.output_len
    if total > max_model_len:
        raise InputError(
            f"{workload} has a request of {len(longest.prompt):,} + {longest.output_len:,} tokens, but max_model_len "
            f"is {max_model_len:,}: raise it to {total:,}, or choose other requests"
        )
