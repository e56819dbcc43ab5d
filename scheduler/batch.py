"""What the scheduler decides for one step, and its counters. Knows requests and counts: no shapes, no padding."""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: what to compute, and which requests lost their row and blocks to make room for it."""

    items: tuple[Scheduled, ...]
    preempted: tuple[Request, ...]
    step: int  # counts up from 1

    @property
    def num_tokens(self) -> int:
        return sum([item.count for item in self.items])


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A reading of the scheduler's gauges (the first three) and of its counters since the start."""

    running: int
    waiting: int
    kv_usage: float  # share of the blocks that is lent, 0 to 1
    num_preemptions: int
    num_scheduled_tokens: int
    num_recomputed_tokens: int  # scheduled once more, after a preemption or a loss threw their KV away
    num_discarded_tokens: int  # sampled for requests that had ended meanwhile
