"""Times a start: from the process's first instruction to the first answer, and until every planned program is there.

    python scripts/bench_start.py --model llama-3.1-8b --load-format dummy --max-model-len 4096 [--executables DIR]

Without --executables nothing is taken from any cache. With it, run it twice: the first run fills the folder. While the
rest is compiled it generates, and again afterwards, so that one sees what that costs those who are served. Linux.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

from jaxllm.bench.provenance import commit
from jaxllm.config.engine_args import EngineArgs, engine_args
from jaxllm.environment import prepare_environment
from jaxllm.options import OptionParser, add_options

PROMPT = list(range(100, 116))


def process_age() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def main(arguments: list[str]) -> None:
    """Starts an engine, asks it, and prints one line for each moment."""
    parser = OptionParser(prog="bench_start.py", description=__doc__)
    add_options(parser, EngineArgs, "EngineConfig")
    args = engine_args({"use_tqdm_on_load": False, **parser.parse(arguments)})
    logging.basicConfig(level=logging.WARNING)
    prepare_environment(os.environ, has_store=True)
    moments = {"flags read": process_age()}

    def note(name: str) -> None:
        moments[name] = process_age()
        print(f"{moments[name]:7.1f} s  {name}", flush=True)

    from jaxllm.api.async_llm import AsyncLLM  # noqa: F401  (what a server imports)
    from jaxllm.api.start import start_engine
    from jaxllm.config.sampling_params import SamplingParams

    note("imported")
    built = start_engine(args).built
    note("started")
    first = _generate(built.engine, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    note("first answer")
    times = {"greedy step while compiling": _step_ms(built.engine, 0.0)}
    times["sampled step while compiling"] = _step_ms(built.engine, 1.0)
    print(f"{'':11}programs: {built.compiler.progress(built.times.began)}", flush=True)
    built.wait_until_compiled()
    note("all compiled")
    _step_ms(built.engine, 0.0)
    times["greedy step afterwards"] = _step_ms(built.engine, 0.0)
    times["sampled step afterwards"] = _step_ms(built.engine, 1.0)
    again = _generate(built.engine, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    for label, value in built.report():
        print(f"{label:22} {value}")
    for label, ms in times.items():
        print(f"{label:30} {ms:.2f} ms")
    print(f"the first token is {'the same' if again == first else 'another'} afterwards")
    print(json.dumps({"commit": commit(), "moments": moments, "step_ms": times, "report": dict(built.report())}))
    built.close()
    note("closed")


def _generate(engine, params) -> list[int]:
    engine.add(f"r{time.monotonic_ns()}", PROMPT, params)
    tokens: list[int] = []
    while engine.has_work:
        for update in engine.step():
            assert update.finish_reason != "error", update.error
            tokens += update.token_ids
    return tokens


def _step_ms(engine, temperature: float, num_tokens: int = 200) -> float:
    from jaxllm.config.sampling_params import SamplingParams

    start = time.perf_counter()
    _generate(engine, SamplingParams(temperature=temperature, seed=1, max_tokens=num_tokens, ignore_eos=True))
    return (time.perf_counter() - start) / num_tokens * 1e3


if __name__ == "__main__":
    main(sys.argv[1:])
