"""One start of an engine for `jaxllm bench suite`, as a process: python -m jaxllm.bench.suite_part PLAN WRITTEN.

Reads its plan from a file and writes after each workload, so that what has been measured is there whenever it ends.
"""

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from jaxllm.bench.args import bench_engine_args
from jaxllm.environment import prepare_environment

_ITERATED = ("L1", "L8")  # brief: several iterations, whose median counts


def main(plan_file: str, written_file: str) -> int:
    """Measures what the plan asks for; gives the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    prepare_environment(os.environ)
    plan, written = json.loads(Path(plan_file).read_text()), Path(written_file)
    content: dict[str, Any] = {"results": {}}
    try:
        _measure(plan, content, written)
    except Exception as error:
        content["error"] = f"failed: {' '.join(str(error).split())[:300] or type(error).__name__}"
        print(f"jaxllm bench suite: {content['error']}", file=sys.stderr)
        _write(written, content)
        return 1
    return 0


def _measure(plan: dict[str, Any], content: dict[str, Any], written: Path) -> None:
    from jaxllm.bench.ceilings import Ceilings, ceilings_of_device
    from jaxllm.bench.floors import floor_of, work_of
    from jaxllm.bench.own_engine import OwnEngine
    from jaxllm.bench.report import as_json
    from jaxllm.bench.workloads import workload

    args = bench_engine_args(plan["engine"])
    ceilings = Ceilings(*plan["ceilings"]) if plan["ceilings"] else ceilings_of_device(args.dtype)
    content["ceilings"] = ceilings._asdict()
    subject = OwnEngine(args)
    try:
        content["facts"] = subject.facts()
        work = work_of(subject.model, subject.kv_dtype)
        content["work"] = dataclasses.asdict(work) | {"windows": len(work.windows)}
        _write(written, content)
        for name in plan["workloads"]:
            measurement = _measure_workload(subject, name, plan, args.seed)
            lengths = [(len(prompt), output) for prompt, output in workload(name, args.seed, plan["num_prompts"])]
            floor = floor_of(work, ceilings, lengths, plan["engine"]["max_num_seqs"])
            content["results"][name] = as_json(measurement, False) | {"floor": dataclasses.asdict(floor)}
            _write(written, content)
    finally:
        subject.close()


def _measure_workload(subject: Any, name: str, plan: dict[str, Any], seed: int) -> Any:
    from jaxllm.bench.latency import measure_batches
    from jaxllm.bench.subject import requests_for
    from jaxllm.bench.throughput import measure_at_once
    from jaxllm.bench.workloads import workload

    def drawn(repeat: int) -> list:
        return workload(name, seed, plan["num_prompts"], repeat)

    if name not in _ITERATED:
        return measure_at_once(subject, name, drawn(0), drawn(1))[0]
    batches = [requests_for(subject, name, drawn(repeat)) for repeat in range(plan["num_iters"] + 1)]
    return measure_batches(subject, name, batches[:-1], batches[-1:])


def _write(file: Path, content: dict[str, Any]) -> None:
    """Whoever is ended in the middle of it leaves the file as it was."""
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(content))
    beside.replace(file)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
