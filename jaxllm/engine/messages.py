"""What crosses between a front and the engine: plain data, so that the engine can move into a process of its own.

Down: AddRequest, AbortRequests, EngineCall. Up: lists of scheduler.RequestUpdate and EngineReply. An update that
refuses a request has the finish reason "error" and no tokens. A request of n samples comes back under `sample_ids`.
"""

from dataclasses import dataclass
from typing import Any

from jaxllm.config.sampling_params import SamplingParams
from jaxllm.scheduler.request import RequestUpdate


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Run this prompt. `outputs` has the tokens so far of the samples that another engine did not finish."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    outputs: dict[str, list[int]] | None = None


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """End these requests, wherever they stand; ids are those of samples."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineCall:
    """Call this method of the engine, one of ENGINE_CALLS, and tell what it gave in an EngineReply."""

    call_id: int
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineReply:
    """What a call gave, or the error that it raised; `is_refusal` tells that the caller was at fault."""

    call_id: int
    value: Any = None
    error: str | None = None
    is_refusal: bool = False


type Message = AddRequest | AbortRequests | EngineCall
type EngineOutput = RequestUpdate | EngineReply

# Those that give updates, which come before the reply, and those that give a value.
UPDATING_CALLS = frozenset(("pause", "update_params"))
ENGINE_CALLS = UPDATING_CALLS | {
    "resume",
    "is_paused",
    "reset_prefix_cache",
    "start_profile",
    "stop_profile",
    "weight_version",
    "update_weight_version",
}


def sample_ids(request_id: str, n: int) -> list[str]:
    """Gives the ids under which the engine runs the n samples of a request."""
    return [request_id] if n == 1 else [f"{index}_{request_id}" for index in range(n)]


STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's buckets of tokens in a step


@dataclass(frozen=True, slots=True)
class RankStats:
    """What a data rank does, and has done since the start."""

    running: int = 0
    kv_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_step_tokens: int = 0  # computed for requests
    num_padded_tokens: int = 0  # computed in vain

    @property
    def padding_share(self) -> float:
        """The share of padding among the tokens of the rank's steps."""
        return self.num_padded_tokens / max(self.num_padded_tokens + self.num_step_tokens, 1)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of the engine between two steps; counters run since the start. Those who wait belong to no rank."""

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
    steps_by_size: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)  # up to each of STEP_SIZES, and above
    num_blocks: int = 0  # of a data rank's KV pool, the one for padding included
    block_size: int = 0
    ranks: tuple[RankStats, ...] = (RankStats(),)  # of each data rank
