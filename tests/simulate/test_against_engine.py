"""The simulator takes the very steps that the real engine takes of the same trace: tokens, shapes, preemptions."""

import json
import random
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxllm import SamplingParams
from jaxllm.config.engine_args import engine_args
from jaxllm.engine.build import BuiltEngine, build_engine
from jaxllm.engine.loop import read_stats
from jaxllm.engine.model_source import find_model
from jaxllm.mesh.build import build_mesh
from jaxllm.planning.traffic import read_trace
from jaxllm.simulate.arrivals import Arrival, from_trace
from jaxllm.simulate.figures import draw_figures
from jaxllm.simulate.simulator import Setting, simulate

COUNTS = ("num_steps", "num_scheduled_tokens", "num_preemptions", "num_recomputed_tokens", "num_padded_tokens")


class NotingRunner:
    """Notes the tokens and the shape of each step on its way to the real runner."""

    def __init__(self, runner: Any):
        self._runner, self.steps = runner, []

    def execute(self, inputs):
        self.steps.append([list(inputs.num_tokens), list(inputs.shape)])
        return self._runner.execute(inputs)

    def __getattr__(self, name):
        return getattr(self._runner, name)


class Ticks:
    """A step takes a second and its launch a tenth: arrivals are given in steps, so that it does not matter."""

    def device_seconds(self, padded, batch) -> float:
        return 1.0

    def host_seconds(self, num_requests) -> float:
        return 0.1


def run_engine(built: BuiltEngine, arrivals: list[Arrival]) -> dict:
    engine, draw = built.engine, random.Random(0)
    noting: Any = NotingRunner(engine._runner)
    engine._runner = noting
    calls = sent = 0
    brought = []
    while engine.has_work or sent < len(arrivals):
        calls += 1
        while sent < len(arrivals) and (arrivals[sent].step or 0) <= calls:
            prompt = [draw.randrange(3, 300) for _ in range(arrivals[sent].input_len)]
            params = SamplingParams(temperature=0.0, max_tokens=arrivals[sent].output_len, ignore_eos=True)
            engine.add(str(sent), prompt, params)
            sent += 1
        brought.append([int(update.request_id) for update in engine.step()])
    stats = read_stats(engine)
    return {name: getattr(stats, name) for name in COUNTS} | {
        "ranks": [[each.num_step_tokens, each.num_preemptions] for each in stats.ranks],
        "steps": noting.steps,
        "brought": [places for places in brought if places],
    }


def run_simulator(built: BuiltEngine, arrivals: list[Arrival], block_size: int, num_ranks: int) -> dict:
    setting = Setting(
        scheduler=built.engine.scheduler.config,
        buckets=built.buckets,
        num_blocks=built.memory.num_blocks,
        block_size=block_size,
        windows=built.model.kv_layout.windows,
        num_ranks=num_ranks,
    )
    record = simulate(arrivals, setting, Ticks())
    figures = draw_figures(record, setting)
    return {name: getattr(figures, name) for name in COUNTS} | {
        "ranks": [[each.num_tokens, each.num_preemptions] for each in figures.ranks],
        "steps": [[list(step.num_tokens), list(step.shape)] for step in record.steps],
        "brought": [places for places in record.sampled if places],
    }


def compare(folder: Path | str, trace: str, num_ranks: int) -> tuple[dict, dict]:
    """Runs both on as many data ranks."""
    arrivals = from_trace(read_trace(trace), trace)
    args = engine_args(
        {
            "model": str(folder),
            "enforce_eager": True,
            "data_parallel_size": num_ranks,
            "num_gpu_blocks_override": 11,
            "max_model_len": 112,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 24,
            "max_prefill_tokens": 20,
        }
    )
    built = build_engine(args, find_model(args), mesh=build_mesh(num_ranks, 1, jax.devices()[:num_ranks]))
    try:
        return run_engine(built, arrivals), run_simulator(built, arrivals, args.block_size, num_ranks)
    finally:
        built.close()


def write_trace(folder: Path, count: int) -> str:
    """Three requests every third step, and after a pause some more."""
    lines = [
        {"input_length": 5 + 37 * i % 61, "output_length": 8 + 29 * i % 31, "step": 1 + 3 * (i // 3) + 140 * (i > 9)}
        for i in range(count)
    ]
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder / "trace.jsonl")


def test_every_step_of_a_small_pool_is_the_engines(golden, tmp_path):
    real, ours = compare(golden / "llama", write_trace(tmp_path, 14), 1)
    assert ours == real
    assert real["num_preemptions"] > 2
    assert real["num_recomputed_tokens"] > 0
    assert real["num_steps"] > 100


IN_A_PROCESS = """
import json, runpy, sys
names = runpy.run_path(sys.argv[1])
print(json.dumps(names["compare"](sys.argv[2], sys.argv[3], 2)))
"""


@pytest.mark.slow
def test_every_step_of_two_data_ranks_is_the_engines(golden, run_program, tmp_path):
    trace = write_trace(tmp_path, 30)
    real, ours = json.loads(run_program(IN_A_PROCESS, __file__, golden / "llama", trace, num_devices=2))
    assert ours == real
    assert real["num_preemptions"] > 2
    assert all(num_tokens > 300 for num_tokens, _ in real["ranks"])
