"""`jaxllm simulate`: how an engine would do with some traffic, said beforehand. Needs no accelerator, no weights."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxllm.config.engine_args import DEFAULT_MODEL, flag
from jaxllm.config.errors import InputError
from jaxllm.config.writable import check_writable
from jaxllm.options import OptionParser, add_model_argument, add_options, with_model
from jaxllm.planning.command import MODEL_HELP


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateArgs:
    """Flags of `simulate`."""

    model: str = flag(DEFAULT_MODEL, MODEL_HELP)
    devices: str | None = flag(None, "how many of which device: 8xA100-80G, 2xH200, 4xH100, 4xL40S")
    device_file: str | None = flag(None, "JSON description of the device, instead of a known one")
    data_parallel_size: int | None = flag(None, "copies of the model; default: as many as the devices hold")
    tensor_parallel_size: int = flag(1, "devices that share a copy")
    trace: str | None = flag(
        None, "JSON Lines with input_length, output_length and timestamp (ms) or step (before which it comes)"
    )
    workload: str | None = flag(None, "requests of a workload, W1, W2 or W3, instead of lengths")
    input_len: int | None = flag(None, "tokens of each prompt; default 1024")
    output_len: int | None = flag(None, "tokens of each answer; default 128")
    num_requests: int | None = flag(None, "how many; default: the workload's, or 1000")
    request_rate: float | None = flag(None, "requests a second over all devices; default: all come at once")
    arrivals: str | None = flag(None, "poisson, constant or at-once; default: poisson where there is a rate")
    seed: int = flag(0, "of the arrivals")
    max_num_seqs: int = flag(256, "requests running at once in a copy")
    max_num_batched_tokens: int = flag(8192, "most tokens in a copy's step")
    max_model_len: int | None = flag(None, "most tokens of a request; default: what model and pool allow")
    block_size: int = flag(16, "tokens in a KV block")
    num_gpu_blocks_override: int | None = flag(None, "KV blocks of a copy, instead of what memory allows")
    gpu_memory_utilization: float = flag(0.9, "share of the memory for weights, temporaries and KV pool")
    enable_prefix_caching: bool = flag(True, "keep the KV of requests, so that preempted ones find theirs again")
    scheduling_policy: str = flag("fcfs", "who runs next, as of serve")
    max_prefill_tokens: int = flag(0, "most prompt tokens in a step; 0 is no limit")
    long_prefill_token_threshold: int = flag(0, "most tokens of one request in a step; 0 is no limit")
    target_tpot_ms: float | None = flag(None, "most milliseconds between two tokens, as of serve")
    fill_steps: bool = flag(True, "put a few tokens off where a step would be padded for them, as the engine does")
    dtype: str = flag("auto", "auto, float32, bfloat16 or float16; auto is the model's 16-bit type")
    kv_cache_dtype: str = flag("auto", "auto (the model's dtype), fp8, bfloat16, float16 or float32")
    sweep: bool = flag(False, "try all (data, tensor) of the devices with the limits of the next two")
    sweep_num_seqs: tuple[str, ...] = flag(("32", "64", "128", "256"), "values of --max-num-seqs to sweep over")
    sweep_token_budgets: tuple[str, ...] = flag(("2048", "8192"), "values of --max-num-batched-tokens to sweep over")
    json: str | None = flag(None, "file to write all figures to")
    html: str | None = flag(None, "page of figures and charts to write, .html, which needs no other file")
    png: str | None = flag(None, "the charts as a picture, .png; needs matplotlib")


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags."""
    add_model_argument(parser)
    add_options(parser, SimulateArgs, "simulate")


def run(values: dict[str, Any]) -> int:
    """Simulates and prints; gives the exit code.

    Raises:
        InputError: a mistake of the user's.
    """
    args = SimulateArgs(**with_model(values))
    if args.devices is None and args.device_file is None:
        raise InputError("devices is missing: name them, such as --devices 2xH200")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # arithmetic: a device that is here is left alone
    from jaxllm.simulate.call import Options, find_subject
    from jaxllm.simulate.charts import check_files

    check_writable("json", args.json)
    check_files(args.html, args.png)
    given = {field.name: getattr(args, field.name) for field in fields(Options)}
    options, requests = Options(**given), requests_of(args)
    subject = find_subject(
        args.model,
        args.devices or "1",
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        device_file=args.device_file,
    )
    if args.sweep:
        _sweep(args, subject, options, requests)
    else:
        _simulate(args, subject, options, requests)
    return 0


def requests_of(args: SimulateArgs) -> Sequence[Any]:
    """Reads the traffic that the flags describe.

    Raises:
        InputError: they contradict each other, or a value is out of range.
    """
    from jaxllm.planning.traffic import read_trace
    from jaxllm.simulate.arrivals import from_trace, lengths_of, synthetic

    for name, limit in {"input_len": 1, "output_len": 1, "num_requests": 1, "request_rate": 1e-6}.items():
        value = getattr(args, name)
        if value is not None and not value >= limit:
            raise InputError(f"{name} must be {f'at least {limit}' if limit >= 1 else 'above 0'}, got {value}")
    if args.trace is not None:
        _refuse(args, "a trace", "workload", "input_len", "output_len", "num_requests", "request_rate", "arrivals")
        return from_trace(read_trace(args.trace), args.trace)
    if args.workload is not None:
        _refuse(args, "a workload", "input_len", "output_len")
    if args.arrivals == "at-once":
        _refuse(args, "arrivals='at-once'", "request_rate")
    lengths = lengths_of(args.workload, args.input_len or 1024, args.output_len or 128, args.num_requests)
    usual = "at-once" if args.request_rate is None else "poisson"
    return synthetic(lengths, args.arrivals or usual, args.request_rate, args.seed)


def _refuse(args: SimulateArgs, beside: str, *names: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise InputError(
                f"{name}={getattr(args, name)} is given beside {beside}, which tells that itself: keep one"
            )


def _simulate(args: SimulateArgs, subject: Any, options: Any, requests: Sequence[Any]) -> None:
    from jaxllm.planning.png import write_png
    from jaxllm.simulate import charts, tables
    from jaxllm.simulate.call import mesh_of, simulate_on

    mesh = mesh_of(subject, args.data_parallel_size, args.tensor_parallel_size)
    for label, value in tables.facts(subject, mesh):
        print(f"{label:18}{value}")
    figures = simulate_on(subject, mesh, requests, options)
    tables.print_figures(figures)
    _write_json(args.json, tables.as_json(subject, mesh, figures))
    title = f"{subject.shape.name} on {subject.num_devices} x {subject.device.name}: simulated"
    if args.html is not None:
        told = [*tables.facts(subject, mesh), *tables.rows(figures)]
        shown = charts.html_table(tables.TIMES, tables.time_rows(figures))
        shown += charts.html_table(tables.RANKS, tables.rank_rows(figures))
        charts.write_page(args.html, title, told, charts.charts_of(figures), shown)
    if args.png is not None:
        write_png(args.png, charts.charts_of(figures))


def _sweep(args: SimulateArgs, subject: Any, options: Any, requests: Sequence[Any]) -> None:
    from jaxllm.planning.png import write_png
    from jaxllm.simulate import charts, tables
    from jaxllm.simulate.sweep import Trial, sweep

    def progress(trial: Trial) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{trial}", end="", file=sys.stderr, flush=True)

    for label, value in tables.facts(subject):
        print(f"{label:18}{value}")
    sizes = _numbers("sweep_num_seqs", args.sweep_num_seqs), _numbers("sweep_token_budgets", args.sweep_token_budgets)
    trials = sweep(subject, requests, options, *sizes, progress)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    tables.print_sweep(trials)
    _write_json(args.json, tables.sweep_json(subject, trials))
    title = f"{subject.shape.name} on {subject.num_devices} x {subject.device.name}: simulated"
    if args.html is not None:
        shown = charts.html_table(tables.TRIALS, tables.trial_rows(trials))
        charts.write_page(args.html, title, tables.facts(subject), [charts.sweep_chart(trials, title)], shown)
    if args.png is not None:
        write_png(args.png, [charts.sweep_chart(trials, title)])


def _numbers(name: str, given: tuple[str, ...]) -> list[int]:
    words = [word for part in given for word in part.split(",") if word]
    if wrong := [word for word in words if not word.isdecimal()]:
        raise InputError(f"{name}: {wrong[0]!r} is not a whole number")
    return sorted({int(word) for word in words})


def _write_json(file: str | None, said: dict[str, Any]) -> None:
    if file is not None:
        Path(file).expanduser().write_text(json.dumps(said, indent=2) + "\n")
