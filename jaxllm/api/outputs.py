"""Results, shaped as vLLM's. Plain data: knows nothing of how they came about."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of time.monotonic(); None until they happened."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One continuation. finish_reason: None while it goes on, then stop, length, abort or error.

    stop_reason: the stop string or stop token id that ended it; None for EOS. The token that ended it is among
    token_ids, its text is not.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its continuations, as far as they have come."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What came new for a request: text and tokens since the last delta, and how it ended if it did.

    num_output_tokens counts all tokens so far that belong to the output (none past a stop string).
    """

    text: str = ""
    token_ids: tuple[int, ...] = field(default=())
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
