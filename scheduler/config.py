"""The scheduler's limits. Knows numbers and the names of policies: no flags, no model, no memory."""

from dataclasses import dataclass

from jaxllm.scheduler.policy import policy_named


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How many requests run at once, how many tokens a step computes, how long a request may become."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"

    def __post_init__(self) -> None:
        for name, least in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("max_model_len", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        policy_named(self.policy)
