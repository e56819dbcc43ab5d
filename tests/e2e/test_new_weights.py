"""New weights while requests run, each way of treating their KV held against a computation from scratch."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import SamplingParams
from jaxllm.models.given import collect

NUM_TOKENS = 24
ROOMY = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 1024}


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def driver(engine_of: Any) -> Iterator[Any]:
    with engine_of("llama", **ROOMY) as driver:
        yield driver


@pytest.fixture(scope="module")
def weights(driver: Any) -> tuple[Any, Any]:
    """The checkpoint's, and others: with a few features in other places."""
    old = driver.engine.weights
    return collect(old), collect(jax.tree.map(lambda w: np.roll(np.asarray(w), 3, axis=-1), old))


def from_scratch(driver: Any, name: str, prompt: list[int], num_tokens: int) -> list[int]:
    driver.engine.reset_prefix_cache()
    driver.add(name, prompt, greedy(num_tokens))
    driver.run()
    return driver.tokens[name]


def swap_midway(driver: Any, name: str, prompt: list[int], new: Any, kv: str) -> int:
    """Starts a request, and changes the weights after some of its tokens; gives how many it had then."""
    driver.add(name, prompt, greedy(NUM_TOKENS))
    for _ in range(8):
        driver.step()
    driver._take(driver.engine.update_params(new, kv))
    driver.engine.scheduler.check()
    return len(driver.tokens[name])


def test_tokens_that_follow_new_weights_are_those_of_a_computation_from_scratch(
    driver: Any, weights: tuple[Any, Any], golden_cases: Any
):
    old, new = weights
    prompt = golden_cases("llama")[3]["prompt_ids"]
    whole = from_scratch(driver, "whole", prompt, NUM_TOKENS)
    had = swap_midway(driver, "recomputed", prompt, new, "recompute")
    driver.run()
    recomputed = driver.tokens["recomputed"]
    assert recomputed[:had] == whole[:had]
    assert 4 < had < 12
    assert recomputed[had:] == from_scratch(driver, "rest", [*prompt, *whole[:had]], NUM_TOKENS - had)
    under_new = from_scratch(driver, "new", prompt, NUM_TOKENS)
    driver.engine.update_params(old)

    assert swap_midway(driver, "kept", prompt, new, "keep") == had
    driver.add("beside", prompt, greedy(NUM_TOKENS))  # finds nothing of what was computed before
    driver.run()
    driver.add("behind", prompt, greedy(NUM_TOKENS))
    driver.run()
    kept = driver.tokens["kept"]
    assert kept[:had] == whole[:had]
    assert kept != recomputed
    assert driver.tokens["beside"] == driver.tokens["behind"] == under_new != whole
    driver.engine.update_params(old)

    assert swap_midway(driver, "the same", prompt, old, "keep") == had
    driver.add("waits", prompt, greedy(4))
    driver.run()
    assert driver.tokens["the same"] == whole

    driver.add("runs", prompt, greedy(NUM_TOKENS))
    for _ in range(8):
        driver.step()
    driver.add("comes late", prompt, greedy(NUM_TOKENS))
    driver._take(driver.engine.update_params(new, "drop"))
    assert (driver.tokens["runs"], driver.ends["runs"]) == (whole[:had], "abort")
    driver.run()
    assert driver.tokens["comes late"] == under_new
