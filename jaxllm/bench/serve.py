"""`jaxllm bench serve`: requests at a rate to a server with OpenAI's API. Knows the order: ask, warm up, measure."""

import asyncio
import contextlib
import datetime
import gc
import json
import math
import resource
from typing import TYPE_CHECKING, Any

from jaxllm.bench.serve_args import ServeBenchArgs
from jaxllm.config.errors import InputError
from jaxllm.config.writable import check_writable
from jaxllm.options import OptionParser, add_options

if TYPE_CHECKING:  # what measures is imported when it is called: --help and mistakes need none of it
    from jaxllm.bench.serve_client import Record, Server
    from jaxllm.bench.serve_figures import ServeFigures
    from jaxllm.bench.serve_load import Requests

TITLE = "bench serve"
_LATE = 0.05  # seconds behind its plan from which a client is said to be too slow


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags."""
    add_options(parser, ServeBenchArgs, TITLE)


def run(values: dict[str, Any]) -> int:
    """Measures; gives the exit code: 1 where no request was answered, or no rate meets the targets.

    Raises:
        InputError: a mistake of the user's.
    """
    args = ServeBenchArgs(**values)
    from jaxllm.planning.png import check_picture

    check_picture("plot", args.plot)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    check_writable("output_json", args.result_file("model", date))
    _allow_many_connections()
    return asyncio.run(_run(args, values, date))


async def _run(args: ServeBenchArgs, values: dict[str, Any], date: str) -> int:
    from jaxllm.bench.provenance import command_line, commit
    from jaxllm.bench.report import print_facts, tell
    from jaxllm.bench.serve_client import connect
    from jaxllm.bench.serve_load import Requests
    from jaxllm.bench.workloads import digest

    requests = Requests(args)
    secrets: dict[str, Any] = {"api_key": "...", "header": ("...",)}
    shown = values | {name: secret for name, secret in secrets.items() if values.get(name)}
    if args.extra_body is not None:
        shown["extra_body"] = json.dumps(args.extra_body)
    async with connect(args) as server:
        if server.takes_token_ids:
            largest = max(max(request.prompt) for request in requests.draw(0))
            size = args.vocab_size or await server.fitting_vocabulary(largest + 1)
            if size <= largest:
                requests.vocab_size = size
                tell(f"token ids folded into a vocabulary of {size:,}, so the digest is another")
        facts = {
            "command": command_line(TITLE, shown),
            "commit": commit(),
            "date": date,
            "server": args.url,
            "model_id": server.model,
            "num_prompts": len(requests.draw(0)),
            "digest": digest(requests.draw(0)),
        }
        print_facts(facts)
        await _warm_up(server, requests, args)
        gc.collect()
        gc.freeze()  # collecting through what a start leaves would look as if the server had paused
        report = _search if args.find_max_rate else _measure_once
        return await report(server, requests, args, facts)


async def _measure_once(server: "Server", requests: "Requests", args: ServeBenchArgs, facts: dict[str, Any]) -> int:
    from jaxllm.bench.report import tell, write_json
    from jaxllm.bench.serve_report import detail_json, facts_json, print_run, run_charts, run_json, write_charts

    records, figures = await _measure(server, requests, args, None, 0)
    print_run(figures, args)
    if figures.lateness > _LATE:
        tell(
            f"1 in 100 requests was sent {1e3 * figures.lateness:,.0f} ms late or more: this machine cannot send so "
            "fast, and its times are too long"
        )
    said = {**facts_json(facts, args), **run_json(figures, args)}
    write_json(
        args.result_file(server.model, facts["date"]), said | (detail_json(records) if args.save_detailed else {})
    )
    if args.plot is not None:
        write_charts(args.plot, f"{server.model} at {args.root}", run_charts(records, figures))
    return 0 if figures.num_completed else 1


async def _search(server: "Server", requests: "Requests", args: ServeBenchArgs, facts: dict[str, Any]) -> int:
    from jaxllm.bench.report import tell, write_json
    from jaxllm.bench.serve_report import facts_json, print_search, run_json, search_charts, write_charts
    from jaxllm.bench.serve_search import find_max_rate

    async def measure(rate: float, repeat: int) -> "ServeFigures":
        _, figures = await _measure(server, requests, args, rate, repeat)
        if not figures.num_completed:
            raise InputError(f"none of {figures.num_requests:,} requests was answered: {next(iter(figures.errors))}")
        tell(f"{rate:.3f} requests/s: {figures.good_share:.1%} good, {figures.request_throughput:.3f} served/s")
        return figures

    wanted = args.request_rate
    start = wanted if wanted is not None and wanted != math.inf else 1.0
    found = await find_max_rate(measure, start, args.goodput_share, args.rate_tolerance)
    print_search(found, args)
    trials = [run_json(trial, args) for trial in found.trials]
    result = {"max_request_rate": found.rate, "is_limited": found.is_limited, "trials": trials}
    write_json(args.result_file(server.model, facts["date"]), facts_json(facts, args) | result)
    if args.plot is not None:
        write_charts(args.plot, f"{server.model} at {args.root}", search_charts(found, args))
    return 0 if found.rate is not None else 1


async def _measure(
    server: "Server", requests: "Requests", args: ServeBenchArgs, rate: float | None, repeat: int
) -> "tuple[list[Record], ServeFigures]":
    from jaxllm.bench.progress import progress_bar
    from jaxllm.bench.serve_figures import draw_figures
    from jaxllm.bench.serve_load import run_load

    load = requests.load(repeat, rate)
    with progress_bar("measuring" if rate is None else f"{rate:.3f} requests/s", len(load.requests)) as advance:
        records = await run_load(server, load, args.max_concurrency, advance)
    offered = rate or (None if requests.has_times else args.request_rate or math.inf)
    return records, draw_figures(records, args.targets(), offered, args.max_concurrency)


async def _warm_up(server: "Server", requests: "Requests", args: ServeBenchArgs) -> None:
    from jaxllm.bench.progress import progress_bar
    from jaxllm.bench.serve_load import Load, run_load

    if not args.num_warmups:
        return
    drawn = requests.draw(1_000_000)  # of which no trial of a search has the tokens
    load = Load([drawn[i % len(drawn)] for i in range(args.num_warmups)], [0.0] * args.num_warmups)
    with progress_bar("warming up", args.num_warmups) as advance:
        records = await run_load(server, load, args.max_concurrency, advance)
    if all(record.error is not None for record in records):
        raise InputError(f"none of {len(records):,} requests to warm up was answered: {records[0].error}")


def _allow_many_connections() -> None:
    """Lets this process have as many open connections as its user may: each request has one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
