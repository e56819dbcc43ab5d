"""What the scheduler decides for one step, by data rank, and its counters. Knows requests and counts: no shapes."""

from dataclasses import dataclass, field, fields
from typing import NamedTuple

from jaxllm.scheduler.record import record
from jaxllm.scheduler.request import Request


@record
class Scheduled:
    """The tokens of one request in one step."""

    request: Request
    row: int
    start: int  # num_computed before the step
    count: int
    samples: bool  # the step reaches the request's last token, so it samples the next


class Singles(NamedTuple):
    """Requests that go on by one token in each step and sample behind it, as columns.

    They were in the step before with the token that sampled this one. One object serves the steps in which it is the
    same requests on the same rows, so that its identity tells a reader what has not changed.
    """

    requests: tuple[Request, ...] = ()
    rows: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()  # num_computed before a step is this plus the step's tick
    last_ticks: tuple[int, ...] = ()  # of the step that samples the last token which a request may have
    end_token_ids: frozenset[int] = frozenset()  # of any of them
    num_quiet: int = 0


NO_SINGLES = Singles()


@record
class RankBatch:
    """What one data rank computes in a step, the singles first; it may be nothing."""

    others: tuple[Scheduled, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()  # blocks (source, destination), to copy in all layers before the step
    admitted: tuple[Request, ...] = ()  # from waiting, for the first time or again
    grown: tuple[Request, ...] = ()  # of those that ran before, whose block tables became longer
    singles: Singles = NO_SINGLES
    tick: int = 0

    @property
    def items(self) -> tuple[Scheduled, ...]:
        """Makes an item of each single too: for those who look at few steps."""
        singles = self.singles
        if not singles.rows:
            return self.others
        columns = zip(singles.requests, singles.rows, singles.offsets, strict=True)
        made = [Scheduled(request, row, self.tick + offset, 1, True) for request, row, offset in columns]
        return (*made, *self.others)

    @property
    def num_requests(self) -> int:
        return len(self.singles.rows) + len(self.others)

    @property
    def num_tokens(self) -> int:
        return len(self.singles.rows) + sum([item.count for item in self.others])

    @property
    def num_context(self) -> int:
        """Counts the tokens of all requests up to and including the step's."""
        offsets = self.singles.offsets
        return sum(offsets) + len(offsets) * (self.tick + 1) + sum([item.start + item.count for item in self.others])


@record
class ScheduledBatch:
    """One step: what each data rank computes, and which requests lost their row and blocks to make room for it."""

    ranks: tuple[RankBatch, ...]
    step: int  # counts up from 1
    preempted: tuple[Request, ...] = ()
    num_recomputed: int = 0  # of its tokens, those that are computed once more

    @property
    def items(self) -> tuple[Scheduled, ...]:
        """Gives what is computed on all ranks, those of the first one first."""
        if len(self.ranks) == 1:
            return self.ranks[0].items
        return tuple([item for part in self.ranks for item in part.items])

    @property
    def num_requests(self) -> int:
        return sum([part.num_requests for part in self.ranks])

    @property
    def num_tokens(self) -> int:
        return sum([part.num_tokens for part in self.ranks])


@dataclass(slots=True)
class StepDraft:
    """A data rank's part of a step in the making, and what is left of its budget."""

    num_budgeted: int  # tokens
    num_prefill_left: int  # of these, tokens beyond the first of each request
    singles: Singles = NO_SINGLES
    tick: int = 0
    others: list[Scheduled] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    grown: list[Request] = field(default_factory=list)
    num_recomputed: int = 0
    ran_short: bool = False  # blocks did not do for the running requests, so nobody new is admitted
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_left = self.num_budgeted

    @property
    def is_empty(self) -> bool:
        return not (self.others or self.singles.rows)

    def batch(self) -> RankBatch:
        news = tuple(self.copies), tuple(self.admitted), tuple(self.grown)
        return RankBatch(tuple(self.others), *news, self.singles, self.tick)


@dataclass(slots=True)
class Counters:
    """What the scheduler counts since its start, for each data rank."""

    num_preemptions: int = 0
    num_scheduled_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_discarded_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_forked_tokens: int = 0
    num_refound_tokens: int = 0

    def all(self) -> dict[str, int]:
        """Gives them by name; dataclasses.asdict takes ten times as long."""
        return {name: getattr(self, name) for name in _COUNTERS}


_COUNTERS = tuple([counter.name for counter in fields(Counters)])


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A reading of the scheduler's gauges (the first four) and of its counters since the start.

    Of all data ranks together or of one; those who wait or are paused belong to no rank.
    """

    running: int
    waiting: int
    paused: int
    kv_usage: float  # share of the blocks that is lent, 0 to 1
    num_preemptions: int
    num_scheduled_tokens: int
    num_recomputed_tokens: int  # scheduled once more, after a preemption, a pause or a loss threw their KV away
    num_discarded_tokens: int  # sampled for requests that had ended meanwhile
    prefix_cache_queries: int  # tokens of first admissions that were looked up
    prefix_cache_hits: int  # tokens of these that were found
    num_forked_tokens: int  # prompt tokens shared with a parallel sample; neither looked up nor found
    num_refound_tokens: int  # tokens of requests that come back, found again; neither looked up nor recomputed

    @property
    def num_useful_tokens(self) -> int:
        """Counts the scheduled tokens that were computed for the first time and for a request that lived on."""
        return self.num_scheduled_tokens - self.num_recomputed_tokens - self.num_discarded_tokens
