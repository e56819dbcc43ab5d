"""One `bench` command from flags to tables: makes engines, runs what is asked, reports. Measures nothing itself."""

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.bench.args import LatencyArgs, ThroughputArgs, bench_engine_args
from jaxllm.bench.figures import Measurement
from jaxllm.bench.provenance import command_line, commit
from jaxllm.bench.report import as_json, check_folder, print_facts, print_tables, write_json
from jaxllm.bench.subject import Subject
from jaxllm.bench.workloads import WorkloadRequest
from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.writable import check_writable
from jaxllm.environment import keep_command_buffers, prepare_environment

Args = ThroughputArgs | LatencyArgs
Profile = Callable[[Sequence[WorkloadRequest], Measurement], None]  # traces a workload that has been measured
Measure = Callable[[Subject, Profile | None], list[Measurement]]


def run_session(command: str, values: dict[str, Any], args: Args, options: dict[str, Any], measure: Measure) -> int:
    """Measures what `--engine` names and reports it; gives the exit code.

    Raises:
        InputError: a mistake of the user's.
    """
    check_writable("output_json", args.output_json)
    check_folder("profile", args.profile)
    engine = bench_engine_args(options)
    if args.engine == "both":
        from jaxllm.bench.compare import compare

        return compare(command, values, args)
    if not sys.stderr.isatty() and "use_tqdm_on_load" not in options:
        engine = bench_engine_args({**options, "use_tqdm_on_load": False})
    facts = {"command": command_line(command, values), "commit": commit(), "model": engine.model}
    measurements: list[Measurement] = []
    for subject in _subjects(args, engine):
        try:
            facts |= subject.facts()
            print_facts(facts if not measurements else subject.facts())
            measurements += measure(subject, _profile(args, subject, facts))
        finally:
            subject.close()
    print_tables(measurements)
    results = [as_json(measurement, args.save_detailed) for measurement in measurements]
    write_json(args.output_json, {**facts, "results": results})
    return 0


def _subjects(args: Args, engine: EngineArgs) -> Sequence[Subject]:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    if args.engine == "jaxllm":
        prepare_environment(os.environ, has_store=engine.executables is not None)
        if args.profile is not None:
            keep_command_buffers(os.environ)
        from jaxllm.bench.own_engine import OwnEngine  # takes seconds, which a mistake in the flags does not need

        return [OwnEngine(engine)]
    from jaxllm.bench.hf_model import load_hf_model

    model = load_hf_model(engine)
    from jaxllm.bench.hf_engines import ContinuousHF, StaticHF

    makers = {"static": lambda: StaticHF(model, args.hf_batch_size), "continuous": lambda: ContinuousHF(model)}
    return [makers[mode]() for mode in args.hf_mode]


def _profile(args: Args, subject: Subject, facts: Mapping[str, Any]) -> Profile | None:
    if args.profile is None:
        return None
    from jaxllm.bench.own_engine import OwnEngine
    from jaxllm.bench.profiler import Profiler

    assert isinstance(subject, OwnEngine)
    return functools.partial(Profiler(args.profile, args.profile_steps, facts).profile, subject)
