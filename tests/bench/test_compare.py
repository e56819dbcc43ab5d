"""jaxllm beside transformers. What needs torch is skipped where it is not installed."""

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.bench import compare, hf_model
from jaxllm.config.engine_args import EngineArgs

HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.mark.skipif(HAS_TORCH, reason="torch is installed")
@pytest.mark.parametrize("engine", ["hf", "both"])
def test_without_torch_transformers_is_refused_with_one_line(engine: str, refused: Callable):
    line = refused("throughput", "--engine", engine, "--workload", "L1", "--num-prompts", "1")
    assert line == "jaxllm: --engine=hf needs torch, which is not installed here: install torch, or leave --engine out"


@pytest.fixture
def weights() -> dict[str, str]:
    """What transformers says of its weights."""
    return {"hf": hf_model.CHECKPOINT_WEIGHTS}


@pytest.fixture
def two_engines(monkeypatch: pytest.MonkeyPatch, weights: dict[str, str]) -> list[dict[str, Any]]:
    """Stands in for the two processes: writes what they would, and keeps the flags that they got."""
    seen: list[dict[str, Any]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess:
        flags = json.loads(Path(command[-1]).read_text())
        seen.append(flags)
        own = flags["engine"] == "jaxllm"
        result = {"workload": "L1", "num_requests": 2, "output_tokens_per_second": 90.0 if own else 30.0}
        names = ["jaxllm"] if own else ["hf static", "hf continuous"]
        outputs = [[1, 2, 3, 4], [5, 6]] if own else [[1, 2, 3, 4], [5, 7]]
        report = {
            "weights": weights["hf"],
            "results": [result | {"engine": name, "outputs": outputs, "token_times": []} for name in names],
        }
        Path(flags["output_json"]).write_text(json.dumps(report))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(hf_model.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compare.subprocess, "run", run)
    return seen


def test_both_engines_get_the_same_flags_and_their_ratio_is_told(two_engines: list[dict[str, Any]], bench: Callable):
    report, printed = bench("throughput", "--engine", "both", "--workload", "L1", "--num-prompts", "2")
    assert [flags["engine"] for flags in two_engines] == ["hf", "jaxllm"]
    for flags in two_engines:
        assert (flags["workload"], flags["num_prompts"], flags["save_detailed"]) == (["L1"], 2, True)
    assert [(r["engine"], r["ratio"], r["num_same"]) for r in report["ratios"]] == [
        ("hf static", 3.0, 1),
        ("hf continuous", 3.0, 1),
    ]
    assert report["ratios"][0]["agreement"] == 0.75
    assert "outputs" not in report["jaxllm"]["results"][0]
    assert "|  3.00 |" in printed


def test_tokens_of_different_random_weights_are_not_compared(
    two_engines: list[dict[str, Any]], weights: dict[str, str], bench: Callable
):
    weights["hf"] = hf_model.RANDOM_WEIGHTS
    report, printed = bench("throughput", "--engine", "both", "--workload", "L1")
    assert [(r["ratio"], r["num_same"], r["agreement"]) for r in report["ratios"]] == [(3.0, None, None)] * 2
    assert "other weights" in printed


def test_an_engine_that_fails_ends_the_comparison_with_its_exit_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hf_model.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compare.subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 2))
    from jaxllm.bench.args import ThroughputArgs

    assert compare.compare("bench throughput", {}, ThroughputArgs(engine="both")) == 2


@pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama_tied"])
def test_transformers_gives_the_same_tokens_in_both_ways(family: str, golden: Path, tiny: EngineArgs):
    import dataclasses

    from jaxllm.bench.hf_engines import ContinuousHF, StaticHF
    from jaxllm.bench.hf_model import load_hf_model
    from jaxllm.bench.workloads import WorkloadRequest

    cases = json.loads((golden / family / "golden.json").read_text())["cases"]
    requests = [WorkloadRequest(case["prompt_ids"], len(case["output_ids"]) - i % 3) for i, case in enumerate(cases)]
    expected = [case["output_ids"][: r.output_len] for case, r in zip(cases, requests, strict=True)]
    model = load_hf_model(dataclasses.replace(tiny, model=str(golden / family), dtype="float32"))
    for subject in (StaticHF(model, batch_size=3), ContinuousHF(model)):
        assert subject.run(requests, lambda count: None).outputs == expected
