"""Results, shaped as vLLM's. Plain data: knows nothing of how they came about."""

from dataclasses import dataclass, field

from jaxllm.api.logprobs import PositionLogprobs, PromptLogprobs, SampleLogprobs
from jaxllm.scheduler.request import WeightVersion


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of time.monotonic(); None until they happened.

    Of several samples the first token is that of the quickest, the last one that of the slowest.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    longest_output: int = 0  # tokens of the longest sample

    def take_tokens(self, now: float, num_output_tokens: int) -> None:
        """Takes note that a sample has new tokens, and how many it has by now."""
        self.last_token_time = now
        if self.first_token_time is None:
            self.first_token_time = now
        if num_output_tokens > self.longest_output:
            self.longest_output = num_output_tokens

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step that computed some of it."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds from one token to the next; None with fewer than two."""
        if self.first_token_time is None or self.last_token_time is None or self.longest_output < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.longest_output - 1)

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One continuation. finish_reason: None while it goes on, then stop, length, abort or error.

    stop_reason: the stop string or stop token id that ended it; None for EOS. The token that ended it is among
    token_ids, its text is not. cumulative_logprob and logprobs are None unless asked for; logprobs has a position for
    each of token_ids. weight_version is that of the weights which the last token was sampled with; weight_versions has
    (version, index in token_ids) for the first token of each.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_version: WeightVersion | None = None
    weight_versions: list[tuple[WeightVersion, int]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its continuations, as far as they have come. It is finished when all of them are.

    prompt_logprobs, None unless asked for, has a position for each token of the prompt; the first has None.
    weight_version is that of the weights which its last token so far was sampled with.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    weight_version: WeightVersion | None = None


@dataclass(slots=True)  # not frozen: one is made per token, and that would take four times as long
class OutputDelta:
    """What came new for a sample: text and tokens since its last delta, and how it ended if it did.

    num_output_tokens counts all tokens so far that belong to the sample (none past a stop string); cumulative_logprob
    is the sum over them. prompt_logprobs comes once, with the request's first token.
    """

    text: str = ""
    token_ids: tuple[int, ...] = field(default=())
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    index: int = 0
    logprobs: SampleLogprobs | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: PromptLogprobs | None = None
    weight_version: WeightVersion | None = None  # of the weights which its tokens were sampled with


@dataclass(slots=True)
class ContinuationScore:
    """Log-probabilities of a given continuation's tokens behind its prompt; `ranks` has 1 where a token is the best."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]

    @property
    def total(self) -> float:
        """The continuation's log-probability."""
        return sum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Says whether greedy decoding would give just these tokens."""
        return all(rank == 1 for rank in self.ranks)


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. tokens and text begin with the prompt's; logprobs has the candidates at each generated position.

    finish_reason: stop for one that ended at EOS, which is left out unless include_stop_str_in_output; or length.
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]
