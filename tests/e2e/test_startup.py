"""A start on the golden model: shapes that stand in for others, and programs that another process compiled."""

import threading

import pytest

from jaxllm import SamplingParams
from jaxllm.engine import build, step_compiler
from jaxllm.engine.sampler_inputs import SamplerShape

LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 96, "enforce_eager": False}
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True),
)


def answer(driver, prompts, params) -> list[list[int]]:
    """One request after another, so that every step is small."""
    found = []
    for prompt in prompts:
        name = f"{len(driver.tokens)}"
        driver.add(name, prompt, params)
        driver.run()
        found.append(driver.tokens[name])
    return found


def test_tokens_do_not_depend_on_which_shapes_are_compiled_so_far(engine_of, golden_cases, monkeypatch):
    prompts = [case["prompt_ids"][:30] for case in golden_cases("llama")[:2]]
    go_on, compile_step = threading.Event(), step_compiler.compile_step
    covering, used = [], []

    def plan(buckets, platform):
        covering.extend(buckets.covering())
        return [*covering, SamplerShape(2)], [*buckets.plan(), SamplerShape(1)]

    def compile_late(program, shape, *sizes):
        assert shape in covering or go_on.wait(300)
        return compile_step(program, shape, *sizes)

    monkeypatch.setattr(build, "_plan", plan)
    monkeypatch.setattr(step_compiler, "compile_step", compile_late)
    with engine_of("llama", **LIMITS) as driver:
        execute = driver.built.runner.execute
        monkeypatch.setattr(driver.built.runner, "execute", lambda step: used.append(step.shape) or execute(step))
        first = [answer(driver, prompts, params) for params in PARAMS]
        assert set(used) == set(covering)
        go_on.set()
        assert driver.built.wait_until_compiled(120)
        used.clear()
        assert [answer(driver, prompts, params) for params in PARAMS] == first
        assert not set(used) & set(covering)


@pytest.mark.parametrize("change", [{}, {"block_size": 32}])
def test_a_second_start_loads_what_the_first_compiled_if_nothing_differs(
    engine_of, golden_cases, monkeypatch, tmp_path, change, caplog, no_compile_cache
):
    prompts = [golden_cases("llama")[0]["prompt_ids"][:30]]
    options = LIMITS | {"executables": str(tmp_path / "kept")}
    with engine_of("llama", **options) as driver:
        expected = [answer(driver, prompts, params) for params in PARAMS]
    compiled, compile_step = [], step_compiler.compile_step
    monkeypatch.setattr(
        step_compiler, "compile_step", lambda *arguments: compiled.append(arguments[1]) or compile_step(*arguments)
    )
    with engine_of("llama", **options | change) as driver:
        assert [answer(driver, prompts, params) for params in PARAMS] == expected
        assert ("of them loaded" in dict(driver.built.report())["programs"]) is True
    assert bool(compiled) == bool(change)
    assert ("executables are for block size 16 (here 32)" in caplog.text) == bool(change)
