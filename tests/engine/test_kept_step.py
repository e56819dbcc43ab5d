"""A step made out of the one before is, bit for bit, what it would be if it were built anew."""

import random
from typing import Any

import numpy as np
import pytest

from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.buckets import make_buckets
from jaxllm.engine.input_builder import InputBuilder
from jaxllm.engine.step_inputs import host_views
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import Scheduler, SchedulerConfig

ROWS, MAX_BLOCKS, BLOCK_SIZE = 8, 16, 4
BUCKETS = make_buckets(ROWS, 64, MAX_BLOCKS, coarse=False)


@pytest.mark.parametrize(
    ("windows", "num_ranks", "temperature", "num_blocks"),
    [((None,), 1, 0.0, 120), ((None, 6), 1, 0.0, 200), ((None,), 2, 1.0, 120), ((None,), 1, 0.0, 30)],
    ids=["plain", "sliding windows", "two ranks, sampled", "blocks run short"],
)
def test_steps_made_out_of_the_one_before_equal_those_built_anew(windows, num_ranks, temperature, num_blocks):
    config = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=64, max_model_len=MAX_BLOCKS * BLOCK_SIZE)
    scheduler = Scheduler(config, [BlockPool(num_blocks, BLOCK_SIZE) for _ in range(num_ranks)], KVGroups(windows))
    made, anew = (
        InputBuilder(BUCKETS, ROWS, MAX_BLOCKS, len(windows), vocab_size=99, num_ranks=num_ranks) for _ in range(2)
    )
    draw = random.Random(1)
    in_flight, num_made, num_added, num_grown, num_preempted = [], 0, 0, 0, 0
    for _ in range(400):
        while draw.random() < 0.3 and len(scheduler.living) < 2 * ROWS:
            params = SamplingParams(temperature=temperature, seed=num_added)
            prompt = [draw.randrange(99) for _ in range(draw.randint(1, 20))]
            scheduler.add(Request(str(num_added), prompt, draw.randint(1, 40), params=params))
            num_added += 1
        if scheduler.living and draw.random() < 0.02:
            scheduler.abort(draw.choice(list(scheduler.living)))
        batch = scheduler.schedule()
        if batch is not None:
            kept: Any = made._kept
            anew._kept = None
            before = None if kept is None else kept.packed.copy()
            step, expected = made.build(batch), anew.build(batch)
            assert step.shape == expected.shape
            np.testing.assert_array_equal(step.packed, expected.packed)
            assert step.num_tokens == expected.num_tokens
            assert step.num_context == expected.num_context
            assert (step.sampling is None) == (expected.sampling is None)
            if step.sampling is not None and expected.sampling is not None:
                np.testing.assert_array_equal(step.sampling.packed, expected.sampling.packed)
            num_made += before is not None and made._kept is kept
            num_grown += before is not None and made._kept is kept and any(part.grown for part in batch.ranks)
            num_preempted += len(batch.preempted)
            in_flight.append(batch)
        if len(in_flight) == 2 or (in_flight and batch is None):
            oldest = in_flight.pop(0)
            scheduler.update(oldest, [draw.randrange(99) for _ in range(oldest.num_requests)])
            scheduler.check()
    assert num_made > 50
    assert num_grown > 10
    assert (num_preempted > 0) == (num_blocks < 100)


def test_what_the_device_was_given_is_not_written_again():
    config = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=64, max_model_len=64)
    scheduler = Scheduler(config, BlockPool(40, BLOCK_SIZE), KVGroups())
    builder = InputBuilder(BUCKETS, ROWS, MAX_BLOCKS, 1, vocab_size=99)
    scheduler.add(Request("a", [1, 2, 3], 20, params=SamplingParams(temperature=0.0)))
    given = []
    for _ in range(12):
        batch = scheduler.schedule()
        assert batch is not None
        step = builder.build(batch)
        given.append((step, step.packed.copy()))
        scheduler.update(batch, [5])
    for step, as_given in given:
        np.testing.assert_array_equal(step.packed, as_given)
    positions = [int(host_views(step.packed[0], step.shape, 1).position[0]) for step, _ in given[1:]]
    assert positions == list(range(3, 14))
