"""`jaxllm bench suite`: every workload of the comparison on every model named, in one go. Knows processes.

Each start of an engine is a process of its own, so that it has the whole device, and so that one that fails or that
runs out of time takes nothing else with it. What was measured is written all the same, and what was not says why.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxllm.bench.args import SuiteArgs, add_bench_flags, bench_engine_args, sorted_values
from jaxllm.bench.suite_plan import Part, plan
from jaxllm.config.errors import InputError
from jaxllm.config.writable import check_writable
from jaxllm.options import OptionParser, as_flag

TITLE = "bench suite"
_SECONDS_TO_END = 20.0  # that a process gets between being asked to end and being made to


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags and the engine's."""
    add_bench_flags(parser, SuiteArgs, TITLE)


def run(values: dict[str, Any]) -> int:
    """Measures; gives the exit code, 1 where a part failed.

    Raises:
        InputError: a mistake of the user's.
    """
    args, options = sorted_values(SuiteArgs, values)
    _refuse_set_by_suite(options)
    from jaxllm.bench.report import tell
    from jaxllm.bench.suite_report import Suite, print_suite

    check_writable("output_json", args.output_json)
    for model in args.models:
        bench_engine_args(_engine_options(options, model, args.num_seqs))
    if args.engine == "both":
        from jaxllm.bench.hf_model import check_torch

        check_torch()
    from jaxllm.bench.provenance import command_line, commit

    parts = plan(args)
    date = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    suite = Suite({"command": command_line(TITLE, values), "commit": commit(), "date": date, "seconds": 0.0})
    start = time.monotonic()
    until = None if args.seconds is None else start + args.seconds
    try:
        for number, part in enumerate(parts, 1):
            tell(f"part {number} of {len(parts)}: {part.engine}, {part.model}, {part.num_seqs} sequences at once")
            suite.add(part, _run_part(part, args, options, suite.ceilings, until))
    finally:
        for part in parts:
            suite.add_missing(part)
        suite.facts["seconds"] = round(time.monotonic() - start, 1)
        suite.write(args.output_json)
    print_suite(suite)
    return int(suite.has_failed)


def _engine_options(options: Mapping[str, Any], model: str, num_seqs: int) -> dict[str, Any]:
    defaults = {"load_format": "dummy", "max_model_len": 4096, "use_tqdm_on_load": False}
    return {**defaults, **options, "model": model, "max_num_seqs": num_seqs}


def _run_part(
    part: Part, args: SuiteArgs, options: Mapping[str, Any], ceilings: tuple[float, float] | None, until: float | None
) -> dict[str, Any]:
    """Runs a part in a process of its own; gives what it wrote, and under "error" why that is not all."""
    left = None if until is None else until - time.monotonic()
    over = f"the {args.seconds:,.0f} s of --seconds were over" if args.seconds is not None else ""
    late = f"not run: {over}"
    if left is not None and left <= 0:
        return {"error": late}
    with tempfile.TemporaryDirectory(prefix="jaxllm-suite-") as folder:
        given, written = Path(folder) / "plan.json", Path(folder) / "written.json"
        engine = _engine_options(options, part.model, part.num_seqs)
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in engine.items()}
        if part.engine == "jaxllm":
            about = {"workloads": part.workloads, "num_prompts": args.num_prompts, "num_iters": args.num_iters}
            given.write_text(json.dumps({"engine": plain, "ceilings": ceilings, **about}))
            command = ["-m", "jaxllm.bench.suite_part", str(given), str(written)]
        else:
            flags = {"engine": "hf", "workload": list(part.workloads), "num_prompts": args.num_prompts}
            hf = {"hf_mode": list(args.hf_mode), "hf_batch_size": args.hf_batch_size, "output_json": str(written)}
            given.write_text(json.dumps(plain | {k: v for k, v in (flags | hf).items() if v is not None}))
            command = ["-m", "jaxllm", "bench", "throughput", "--config", str(given)]
        process = _start([sys.executable, *command])
        try:
            code = process.wait(left)
            error = f"failed: exit status {code}" if code else None
        except subprocess.TimeoutExpired:
            error = late
        finally:
            _end(process)
        content = json.loads(written.read_text()) if written.exists() else {}
    if error == late and "facts" not in content:
        error = f"not run: the engine had not started when {over}"
    return {"error": error} | content if error else content


def _start(command: list[str]) -> subprocess.Popen:
    # What a part prints is about itself; the suite's own output is one table.
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _refuse_set_by_suite(options: Mapping[str, Any]) -> None:
    for name, instead in (("model", "models"), ("max_num_seqs", "num_seqs")):
        if name in options:
            raise InputError(f"{name}={options[name]!r} is set by the suite itself: give {as_flag(instead)} instead")
