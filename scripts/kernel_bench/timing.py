"""Times programs that call a kernel many times, each with other constants. Knows no operation."""

import dataclasses
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.stages import Compiled

from jaxllm.bench.ceilings import Ceilings
from jaxllm.bench.trace import read_trace
from jaxllm.engine.profile import start_trace, stop_trace

THREADS = 8  # compile at once


@dataclass(slots=True)
class Row:
    """One set of constants of one version in one case."""

    case: str
    version: str
    config: str
    micros: float | None = None
    rate: str = ""
    share: float | None = None
    error: float | None = None  # relative, against the first constants
    note: str = ""
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Runs:
    """A case with its constants to try, the default of each version first, and the programs that time them."""

    name: str
    configs: list[Any]
    make: Callable[[], tuple[Any, ...]]
    program: Callable[[Any], Callable]
    calls: int
    cost: Callable[[Ceilings], tuple[float, float, str]]  # amount of a call, the ceiling of its rate, its unit
    donates: bool = False
    num_defaults: int = 1
    version_of: Callable[[Any], str] = lambda config: "triton"


def measure(run: Runs, ceilings: Ceilings, sweep: bool, until: float, rounds: int) -> Iterator[Row]:
    """Gives the rows of a case, printing each; constants that do not compile or run get a note instead of a time."""
    arrays = run.make()
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
    configs = run.configs if sweep else run.configs[: run.num_defaults]
    expected: np.ndarray | None = None
    with ThreadPoolExecutor(THREADS) as pool:
        # The defaults are always tried.
        limits = [*[math.inf] * run.num_defaults, *[until] * (len(configs) - run.num_defaults)]
        programs = [pool.submit(compile_program, run, *pair, shapes) for pair in zip(configs, limits, strict=True)]
        for config, future in zip(configs, programs, strict=True):
            row = Row(run.name, run.version_of(config), show(config))
            try:
                compiled = future.result()
                if compiled is None:
                    row.note = "not tried: no time left"
                else:
                    row.seconds, outcome, arrays = time_program(compiled, arrays, run.donates, rounds)
                    amount, ceiling, unit = run.cost(ceilings)
                    rate = amount * run.calls / statistics.median(row.seconds)
                    row.micros, row.share = amount / rate * 1e6, rate / ceiling
                    row.rate = f"{rate / 1e12:.{2 if unit == 'TB/s' else 0}f} {unit}"
                    expected = outcome if expected is None else expected
                    row.error = relative(outcome, expected)
            except Exception as error:  # whatever one set of constants does, the others go on
                row.note = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"
            print(line(row), flush=True)
            yield row


def compile_program(run: Runs, config, until: float, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Compiled | None:
    """Gives the compiled program, or None when it is too late to begin."""
    if time.perf_counter() > until:
        return None
    return jax.jit(run.program(config), donate_argnums=(0,) if run.donates else ()).lower(*shapes).compile()


def time_program(
    compiled: Compiled, arrays: tuple[jax.Array, ...], donates: bool, rounds: int, queued: int = 12
) -> tuple[list[float], np.ndarray, tuple[jax.Array, ...]]:
    """Gives the seconds of a program in each round of `queued` in a row, the last outcome, and the arrays after it.

    On a GPU they are the device's own, of one program a round: of short kernels the host launches no more than the
    device runs, and its clock would tell of the host.
    """
    outcome = None

    def run() -> Any:
        nonlocal arrays, outcome
        outcome = compiled(*arrays)
        if donates:
            arrays, outcome = (outcome[0], *arrays[1:]), outcome[1]
        return outcome

    clock = device_seconds if jax.default_backend() == "gpu" else functools.partial(host_seconds, queued=queued)
    seconds = [clock(run) for _ in range(rounds + 2)][2:]
    return seconds, np.asarray(outcome, np.float32), arrays


def host_seconds(run: Callable[[], Any], queued: int) -> float:
    """What each of so many runs in a row takes."""
    begin = time.perf_counter()
    for _ in range(queued - 1):
        run()
    jax.block_until_ready(run())
    return (time.perf_counter() - begin) / queued


def device_seconds(run: Callable[[], Any]) -> float:
    """From the beginning of the first kernel of a run to the end of the last, under the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        start_trace(folder, python_calls=False)
        try:
            jax.block_until_ready(run())
        finally:
            stop_trace()
        events = [event for event in read_trace(Path(folder)).device_events if not event.is_transfer]
    return (max(event.end for event in events) - events[0].start) / 1e9


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    if not np.isfinite(found).all():
        return float("nan")
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def unique(configs: list) -> list:
    return list(dict.fromkeys(configs))


def show(config: Any) -> str:
    """The constants of a version, a dataclass of them."""
    return ", ".join(f"{name.name} {getattr(config, name.name)}" for name in dataclasses.fields(config))


def line(row: Row) -> str:
    if row.micros is None:
        return f"| {row.case:28} | {row.version} | {row.note} | {row.config} |"
    error = "" if row.error is None else f"{row.error:.1e}"
    speed = f"{row.micros:8.1f} us | {row.rate:>12} | {row.share:6.1%}"
    return f"| {row.case:28} | {row.version} | {speed} | {error} | {row.config} |"
