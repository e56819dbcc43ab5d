"""Recorded runs, each of which is limited by what was done to it: scripts/record_diagnoses.py says how."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from jaxllm.diagnose.bench_evidence import evidence_of, read_bench
from jaxllm.diagnose.evidence import Evidence
from jaxllm.diagnose.rules import diagnose

ROOT = Path(__file__).parents[2]
CASES = json.loads((Path(__file__).parent / "recorded.json").read_text())["cases"]
H200 = [
    (file, evidence)
    for file in ("engine-h200.json", "engine-8b-h200.json")
    for evidence in read_bench(str(ROOT / "docs" / "benchmarks" / file))
]


def recorded(kind):
    return [evidence_of(case["facts"], case["row"], case["result"]) for case in CASES if case["kind"] == kind]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind']}: {case['result']['workload']}")
def test_a_recorded_run_is_told_what_limited_it(case):
    found = diagnose(evidence_of(case["facts"], case["row"], case["result"]))
    assert found.kind == case["kind"]
    assert len(found.evidence) >= 3
    assert bool(found.change) == bool(found.effect) == (found.kind != "none")


@pytest.mark.parametrize(("file", "evidence"), H200, ids=lambda value: getattr(value, "name", value))
def test_an_h200_is_limited_by_compute_when_loaded_and_by_nothing_when_not(file, evidence):
    assert diagnose(evidence).kind == ("none" if evidence.name in ("L1", "L8") else "compute")


def test_there_are_five_of_each_kind():
    kinds = Counter(case["kind"] for case in CASES)
    kinds["compute"] += sum(evidence.name.startswith("W") for _, evidence in H200)
    assert min(kinds[kind] for kind in ("memory", "compute", "scheduling", "input")) >= 5


def test_the_cause_and_the_flag_go_with_the_kind():
    memory, (rows, *_) = recorded("memory")[0], [e for e in recorded("scheduling") if e.is_cpu]
    assert "computed again" in " ".join(diagnose(memory).evidence)
    assert "--kv-cache-dtype fp8" in diagnose(memory).change
    assert diagnose(rows).change.startswith("--max-num-seqs ")
    host = next(e for e in recorded("scheduling") if not e.is_cpu)
    assert diagnose(host).cause == "the host is slower than the device"
    assert "by the cost model of the H200 +" in diagnose(host).effect
    front = [diagnose(e).cause for e in recorded("input")]
    assert sum("tokenizer" in cause for cause in front) == 2
    assert sum("arrive more slowly" in cause for cause in front) == len(front) - 2


def test_what_is_expected_of_more_rows_is_near_what_another_engine_measured():
    # docs/benchmarks/vllm-0.26-h200.json: W1 with 256 and with 512 sequences.
    w1 = next(evidence for _, evidence in H200 if evidence.name == "W1")
    expected = float(diagnose(w1).effect.split("+")[1].split("%")[0]) / 100
    assert diagnose(w1).change.startswith("--max-num-seqs 512")
    assert expected == pytest.approx(20_587 / 18_931 - 1, abs=0.05)


def test_rows_are_not_raised_beyond_what_the_pool_holds():
    full = Evidence(
        name="",
        seconds=10.0,
        num_requests=100,
        num_prompt_tokens=1000,
        num_output_tokens=1000,
        running=16.0,
        waiting=50.0,
        rows=16,
        busy=1.0,
        kv_peak=0.2,
    )
    assert diagnose(full).change == "--max-num-seqs 64"
    assert diagnose(dataclasses.replace(full, kv_peak=0.4)).change == "--max-num-seqs 32"
    assert diagnose(dataclasses.replace(full, kv_peak=0.95)).kind == "memory"
    assert diagnose(dataclasses.replace(full, kv_peak=0.7, running=2.0)).kind == "memory"  # 16 rows, and no third fits
