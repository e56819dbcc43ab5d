from dataclasses import replace

import pytest

from jaxllm.scheduler.scheduler import SchedulerConfig

GOOD = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("max_num_seqs", 0, 1), ("max_num_batched_tokens", 0, 1), ("max_model_len", 1, 2), ("max_prefill_tokens", -1, 0)],
)
def test_a_limit_too_small_to_serve_anything_is_refused(name: str, value: int, least: int):
    with pytest.raises(ValueError, match=f"{name} must be at least {least}, got {value}"):
        replace(GOOD, **{name: value})


def test_the_policy_must_be_a_known_one():
    with pytest.raises(ValueError, match="known: cache-aware, cache-aware-priority, fcfs, longest-first, priority"):
        replace(GOOD, policy="lottery")


def test_step_sizes_must_ascend():
    with pytest.raises(ValueError, match=r"step_sizes must ascend, got \(8, 4\)"):
        replace(GOOD, step_sizes=(8, 4))
