"""What crosses between a front and the engine: plain data, so that the engine can move into a process of its own.

Down: AddRequest, AbortRequests, ResetPrefixCache. Up: lists of scheduler.RequestUpdate. One that refuses a request
has the finish reason "error" and no tokens.
"""

from dataclasses import dataclass

from jaxllm.config.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Run this prompt."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """End these requests, wherever they stand."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all cached prefixes."""


type Message = AddRequest | AbortRequests | ResetPrefixCache


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of the engine between two steps; counters run since the start."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    num_preemptions: int = 0
    num_scheduled_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_discarded_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_steps: int = 0
    num_padded_tokens: int = 0


def sample_ids(request_id: str, n: int) -> list[str]:
    """Names the samples of a request: its own name for one, else their numbers in front of it."""
    return [request_id] if n == 1 else [f"{sample}_{request_id}" for sample in range(n)]
