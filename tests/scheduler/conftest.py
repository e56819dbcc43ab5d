"""Makes schedulers and requests of a few tokens, and plays the engine for them."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.pace import Pace
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import Scheduler, SchedulerConfig


def _scheduler(
    *,
    seqs: int = 4,
    budget: int = 64,
    max_model_len: int = 32,
    num_blocks: int = 65,
    block_size: int = 2,
    windows: tuple[int | None, ...] = (None,),
    pace: Pace | None = None,
    **options: Any,
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=max_model_len, **options)
    return Scheduler(config, BlockPool(num_blocks, block_size), KVGroups(windows), pace)


def _add(
    scheduler: Scheduler,
    request_id: str,
    num_prompt: int,
    max_new_tokens: int = 8,
    eos: tuple[int, ...] = (),
    stop: tuple[int, ...] = (),
    prompt: list[int] | None = None,
    **options: Any,
) -> Request:
    """Adds a request whose prompt shares no prefix with that of another id, unless one is given."""
    if prompt is None:
        prompt = [1000 * ord(request_id[0]) + i for i in range(num_prompt)]
    request = Request(request_id, prompt, max_new_tokens, frozenset(eos), frozenset(stop), **options)
    scheduler.add(request)
    return request


@pytest.fixture
def make_scheduler() -> Callable[..., Scheduler]:
    return _scheduler


@pytest.fixture
def add() -> Callable[..., Request]:
    return _add
