from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.bench.own_engine import OwnEngine
from jaxllm.bench.subject import requests_for
from jaxllm.bench.workloads import WorkloadRequest, folded, random_requests
from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.errors import InputError

RANDOM = ("--num-prompts", "6", "--input-len", "20", "--output-len", "12")


def test_every_request_gets_its_tokens_and_every_figure_a_value(bench: Callable):
    report, printed = bench("throughput", *RANDOM, "--save-detailed")
    (result,) = report["results"]
    assert [len(tokens) for tokens in result["outputs"]] == [12] * 6
    assert (result["num_prompt_tokens"], result["num_output_tokens"], result["total_num_tokens"]) == (120, 72, 192)
    assert result["tokens_per_second"] == pytest.approx(192 / result["elapsed_time"])
    for name in ("ttft", "tpot", "itl", "e2e"):
        spread = result["latencies_ms"][name]
        assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"]
    for times in result["token_times"]:
        assert times == sorted(times)
        assert 0 < times[0] <= times[-1] <= result["elapsed_time"]
    steps = result["steps"]
    assert steps["num_steps"] >= 24  # 6 requests of 12 tokens on 4 rows
    assert 1 < steps["mean_batch"] <= 4
    assert 0 < steps["kv_usage_peak"] <= 1
    assert 0 <= steps["padding_share"] < 1
    assert steps["host_ms"] * steps["num_steps"] < 1e3 * result["elapsed_time"]
    assert steps["num_recomputed_tokens"] == steps["num_preemptions"] == 0
    for fact in ("command", "commit", "model", "device", "dtype", "versions", "start_up_seconds"):
        assert report[fact]
        assert fact.replace("_", " ") in printed
    assert f"| {'random':>8} | jaxllm | {result['digest']} |" in printed


def test_several_workloads_are_measured_in_one_go_and_limited_together(bench: Callable):
    report, _ = bench("throughput", "--workload", "H1,L1", "--num-prompts", "1")
    assert [(r["workload"], r["num_requests"]) for r in report["results"]] == [("H1", 1), ("L1", 1)]
    assert [r["num_output_tokens"] for r in report["results"]] == [180, 256]
    assert "outputs" not in report["results"][0]
    assert "--workload H1,L1 --num-prompts 1" in report["command"]


def test_a_preempted_run_counts_what_it_computed_twice(bench: Callable):
    report, _ = bench("throughput", "--num-prompts", "4", "--input-len", "100", "--output-len", "100")
    steps = report["results"][0]["steps"]
    assert steps["num_preemptions"] > 0
    assert steps["num_recomputed_tokens"] > 0
    assert steps["kv_usage_peak"] > 0.7


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--workload", "W9"], "--workload='W9' is not known; there are L1, L8, W1"),
        (["--workload", "W1", "--input-len", "5"], "--input-len=5 has no effect on a workload"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--engine", "vllm"], "--engine='vllm' is not known; choose one of jaxllm, hf, both"),
        (["--hf-mode", "fast"], "--hf-mode='fast' is not known"),
        (["--dataset-name", "sharegpt"], "--dataset-name='sharegpt' is not supported yet"),
        (["--output-json", "/no/such/folder/x.json"], "cannot be written: there is no folder /no/such/folder"),
        (["--num-promts", "4"], "unknown flag --num-promts; did you mean --num-prompts?"),
    ],
)
def test_a_mistake_is_told_before_anything_is_started(flags: list[str], says: str, refused: Callable):
    assert says in refused("throughput", *flags)


def test_a_request_that_would_be_cut_short_is_refused():
    small: Any = SimpleNamespace(vocab_size=320, max_model_len=100)
    assert len(requests_for(small, "W", [WorkloadRequest([1] * 90, 10)])) == 1
    with pytest.raises(
        InputError, match=r"W has a request of 90 \+ 11 tokens, but max_model_len is 100: raise it to 101"
    ):
        requests_for(small, "W", [WorkloadRequest([1] * 90, 11)])


def test_after_the_warm_up_nothing_is_compiled(tiny: EngineArgs):
    subject = OwnEngine(tiny)
    try:
        first, second = (folded(random_requests(6, 20, 12, 0, repeat), 320) for repeat in (1, 0))
        subject.warm_up(first, lambda count: None)
        compiled = dict(subject._built.runner._compiler._compiled)
        assert compiled
        subject.run(second, lambda count: None)
        assert subject._built.runner._compiler._compiled == compiled
    finally:
        subject.close()


def test_a_failed_step_leaves_nothing_running_and_measures_nothing(tiny: EngineArgs, monkeypatch: pytest.MonkeyPatch):
    subject = OwnEngine(tiny)
    try:
        requests = folded(random_requests(6, 20, 12, 0), 320)
        execute = subject._built.runner.execute
        monkeypatch.setattr(subject._built.runner, "execute", lambda *inputs: 1 / 0)
        with pytest.raises(RuntimeError, match=r"a step failed, so nothing was measured: .*division by zero"):
            subject.run(requests, lambda count: None)
        assert not subject._engine.has_work
        monkeypatch.setattr(subject._built.runner, "execute", execute)
        assert [len(tokens) for tokens in subject.run(requests, lambda count: None).outputs] == [12] * 6
    finally:
        subject.close()
