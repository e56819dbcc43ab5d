"""What was seen of an engine over some time, whoever saw it. Knows numbers and what follows from them; no source."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Means over `seconds`; None where it was not seen. `running`, `waiting` and `rows` are of one of `copies`.

    `waiting` are requests that have been sent and are in no step; `busy` is the share of the time in which steps ran;
    `host_ms` is the host's own work of a step, `wait_ms` what it was blocked on the device meanwhile.
    """

    name: str
    seconds: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    running: float
    waiting: float
    copies: int = 1  # data ranks
    rows: int | None = None  # max_num_seqs
    busy: float | None = None
    kv_peak: float | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    host_ms: float | None = None
    wait_ms: float | None = None
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    is_cpu: bool = False
    model: str | None = None
    device: str | None = None

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.num_output_tokens / self.seconds

    @property
    def mean_context(self) -> float:
        """Tokens that a request's KV holds in the middle of its answer."""
        count = max(self.num_requests, 1)
        return (self.num_prompt_tokens + self.num_output_tokens / 2) / count

    @property
    def is_full(self) -> bool:
        """Tells whether nearly every row was in use."""
        return self.rows is not None and self.running >= 0.8 * self.rows
