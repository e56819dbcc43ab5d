"""One request and what is told of it after a step. Knows token ids as integers: no text, no sampling, no device."""

import enum
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxllm.scheduler.record import record

type FinishReason = Literal["stop", "length", "abort", "error"]
type WeightVersion = int | str


class RequestStatus(enum.Enum):
    """Where a request stands; a preempted one is WAITING again."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PAUSED = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its stop rules and its progress. Only the scheduler writes it.

    No field says prefill or decode: each step moves `num_computed` towards `num_tokens`.
    """

    request_id: str
    prompt_ids: list[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()  # empty when the user ignores EOS
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival_time: float = 0.0
    params: object = None  # the engine's; never looked at here
    deadline: float | None = None  # on the clock of whoever calls Scheduler.expire
    cache_salt: str | None = None  # only requests of equal salt share blocks
    kv_key: tuple[str, ...] = ()  # what else makes the KV of equal tokens differ, as an adapter does
    skip_prefix_cache: bool = False  # computes its whole prompt, which others may still find afterwards
    is_quiet: bool = False  # tokens that it just goes on with are told when it ends, or something else happens to it

    output_ids: list[int] = field(default_factory=list)
    num_told: int = 0  # of a quiet one's output tokens
    block_tables: list[list[int]] = field(default_factory=list)  # one per KV group
    row: int | None = None
    data_rank: int | None = None  # whose row and blocks it has
    num_slots: int = 0  # tokens that the block tables have room for
    num_computed: int = 0  # tokens whose KV is in the cache, or is being written by a step already dispatched
    num_prompt: int = field(init=False)  # tokens of the prompt
    num_tokens: int = field(init=False)  # those that exist: known to the host, or sampled by steps it has not read yet
    max_tokens: int = field(init=False)  # prompt and output together
    end_token_ids: frozenset[int] = field(init=False)
    num_to_recompute: int = 0  # tokens from num_computed on whose KV was thrown away and not yet computed again
    num_preemptions: int = 0  # times it lost its row, whatever for
    num_yields: int = 0  # times it lost it to make room for another
    num_found: int = 0  # tokens that were in the cache when it was admitted last
    num_cached_tokens: int = 0  # the same of its first admission: what its user is told
    num_remembered: int = 0  # blocks, from the first on, that it found in the prefix cache or has entered into it
    kv_generation: int = 0  # how often the weights had changed when it was admitted
    block_hashes: list[bytes] = field(default_factory=list)
    first_scheduled_time: float | None = None  # set by the engine, on the clock of arrival_time
    order: int = 0  # its place among all that ever came
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt_ids)
        self.num_tokens = self.num_known
        self.end_token_ids = self.eos_token_ids | self.stop_token_ids
        self.limit(self.max_new_tokens)

    def limit(self, max_new_tokens: int) -> None:
        """Sets how many tokens it may generate."""
        self.max_new_tokens = max_new_tokens
        self.max_tokens = self.num_prompt + max_new_tokens

    def take_untold(self) -> tuple[int, ...]:
        """Gives the output tokens of a quiet request that have not been told, which then have been."""
        if not self.is_quiet:
            return ()
        untold = tuple(self.output_ids[self.num_told :])
        self.num_told = len(self.output_ids)
        return untold

    @property
    def num_known(self) -> int:
        """Counts the tokens that the host has seen."""
        return self.num_prompt + len(self.output_ids)

    @property
    def num_in_flight(self) -> int:
        """Counts the tokens sampled by dispatched steps that the host has not read yet."""
        return self.num_tokens - self.num_known

    @num_in_flight.setter
    def num_in_flight(self, count: int) -> None:
        self.num_tokens = self.num_known + count

    @property
    def num_pending(self) -> int:
        """Counts the tokens that steps have still to compute before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def is_fully_sampled(self) -> bool:
        """Says whether dispatched steps sample its last token, so that the next updates are bound to finish it."""
        return self.num_tokens >= self.max_tokens

    def check_running(self, block_size: int) -> None:
        """A running request has a row, room for what is computed, and something left to compute or to read."""
        assert self.status is RequestStatus.RUNNING, self.request_id
        assert self.row is not None, self.request_id
        assert self.data_rank is not None, self.request_id
        assert len({len(table) for table in self.block_tables}) == 1, self.request_id
        assert self.num_computed <= self.num_slots == len(self.block_tables[0]) * block_size, self.request_id
        assert self.num_pending > 0, self.request_id
        self._check_counts()

    def check_waiting(self) -> None:
        """A waiting request holds nothing."""
        assert self.status is RequestStatus.WAITING, self.request_id
        self._check_empty()

    def check_paused(self) -> None:
        """A paused request holds nothing."""
        assert self.status is RequestStatus.PAUSED, self.request_id
        self._check_empty()

    def _check_empty(self) -> None:
        assert self.row is None, self.request_id
        assert self.data_rank is None, self.request_id
        assert self.num_computed == 0, self.request_id
        assert not any(self.block_tables), self.request_id
        self._check_counts()

    def _check_counts(self) -> None:
        assert self.num_in_flight >= 0, self.request_id
        assert self.num_to_recompute >= 0, self.request_id
        assert self.num_tokens <= self.max_tokens == len(self.prompt_ids) + self.max_new_tokens, self.request_id


@record
class RequestUpdate:
    """What one step, an abort or a failure brought a request."""

    request_id: str
    token_ids: tuple[int, ...] = ()  # new ones; a stop token is among them
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None
    scores: Any = None  # what the engine adds to it; never looked at here
    weight_version: WeightVersion = 0  # of the weights that its tokens were sampled with
    num_counted: int = 0  # of its tokens, those that StepUpdates.num_quiet of earlier steps or of this one counts
