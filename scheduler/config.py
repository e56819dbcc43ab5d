"""The scheduler's limits. Knows numbers and policies: no flags, no model, no memory."""

from dataclasses import dataclass

from jaxllm.scheduler.policy import Policy, policy_named


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How many requests run at once, how many tokens a step computes, how long a request may become.

    The first two are of each data rank.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str | Policy = "fcfs"  # an object serves one scheduler only, since it holds its waiting requests
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0  # the most tokens of one request in one step; 0 is no limit
    max_prefill_tokens: int = 0  # the most tokens of one step beyond the first of each request; 0 is no limit
    # Tokens in flight beyond the mean of the data ranks up to which a cached prefix draws requests to a rank: four
    # thousand are read in 0.1 ms by an 8B model on an H200.
    rank_imbalance_tokens: int = 4096
    step_sizes: tuple[int, ...] = ()  # what the tokens of a step are padded to, ascending; those worth filling

    def __post_init__(self) -> None:
        least_of = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2}
        least_of |= {"long_prefill_token_threshold": 0, "max_prefill_tokens": 0, "rank_imbalance_tokens": 0}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if list(self.step_sizes) != sorted(set(self.step_sizes)):
            raise ValueError(f"step_sizes must ascend, got {self.step_sizes}")
        if isinstance(self.policy, str):
            policy_named(self.policy)

    @property
    def largest_chunk(self) -> int:
        """Gives the most tokens of one request that a step ever computes."""
        chunk = min(self.max_num_batched_tokens, self.prefill_share + 1)
        return min(chunk, self.long_prefill_token_threshold or chunk)

    @property
    def prefill_share(self) -> int:
        """Gives the tokens that a step may compute beyond the first of each request."""
        return self.max_prefill_tokens or self.max_num_batched_tokens

    def make_policy(self) -> Policy:
        return policy_named(self.policy)() if isinstance(self.policy, str) else self.policy
