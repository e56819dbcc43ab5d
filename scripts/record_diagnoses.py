"""Records runs that `jaxllm diagnose` must tell apart, for tests/diagnose/recorded.json.

python scripts/record_diagnoses.py

Small runs of this machine's CPU: tiny models of tests/golden, whole pools and rows, prompts that a thread tokenizes
first, arrivals one after another. Where a GPU's host is the limit, no CPU can show it: those two come from the real
scheduler before the cost model of an H200. What a run is recorded as is what was done to the engine, not what a rule
said of it. Compute-bound and idle runs of an H200 are in docs/benchmarks and need no recording.
"""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.api.start import start_engine
from jaxllm.bench.figures import Latencies, Measurement, Run, StepFigures, measured
from jaxllm.bench.own_engine import step_figures
from jaxllm.bench.provenance import commit
from jaxllm.bench.report import as_json
from jaxllm.bench.workloads import WorkloadRequest, folded, random_requests
from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.engine import Engine, StepTimes
from jaxllm.mesh.cost_model import StepLoad, step_time
from jaxllm.models.checkpoint.resolve import open_checkpoint
from jaxllm.planning.devices import find_devices
from jaxllm.planning.model_shape import read_model, shape_of
from jaxllm.scheduler.batch import ScheduledBatch
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import Scheduler, SchedulerConfig
from jaxllm.text.gguf_tokenizer import tokenizer_from_gguf
from jaxllm.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "tests" / "diagnose" / "recorded.json"
GOLDEN = ROOT / "tests" / "golden"


class Case(NamedTuple):
    """What is run: requests of equal lengths at once, apart by `gap` times what one takes alone, or behind a text."""

    kind: str
    name: str
    model: str
    num_requests: int
    prompt: int
    output: int
    rows: int
    blocks: int = 512
    gap: float = 0.0
    text: int = 0  # characters that are tokenized before the request can be sent

    @property
    def made(self) -> str:
        at_once = f"apart by {self.gap:g} times what one takes alone" if self.gap else "sent at once"
        behind = f", each behind the tokenizing of {self.text:,} characters" if self.text else ""
        return (
            f"CPU run of tests/golden/{self.model}, {self.num_requests} requests of {self.prompt} and {self.output} "
            f"tokens {at_once}{behind}; --max-num-seqs {self.rows} --num-gpu-blocks-override {self.blocks} "
            "--block-size 8"
        )


CASES = (
    Case("memory", "pool of 8 blocks", "llama", 24, 20, 20, rows=8, blocks=9),
    Case("memory", "pool of 24 blocks", "llama", 32, 40, 60, rows=16, blocks=25),
    Case("memory", "pool of 40 blocks", "qwen3", 32, 24, 60, rows=32, blocks=41),
    Case("memory", "pool of 20 blocks, long prompts", "llama", 20, 100, 20, rows=16, blocks=21),
    Case("memory", "pool of 32 blocks, short prompts", "llama", 48, 8, 50, rows=32, blocks=33),
    Case("scheduling", "one row", "llama", 12, 20, 40, rows=1),
    Case("scheduling", "two rows", "qwen3", 16, 20, 40, rows=2),
    Case("scheduling", "four rows", "llama", 24, 20, 40, rows=4),
    Case("input", "arrivals", "llama", 20, 20, 20, rows=8, gap=1.6),
    Case("input", "arrivals of longer prompts", "llama", 20, 60, 20, rows=16, gap=1.4),
    Case("input", "arrivals, slower ones", "llama", 16, 20, 32, rows=16, gap=2.0),
    Case("input", "texts of 100,000 characters", "llama", 24, 16, 8, rows=16, text=100_000),
    Case("input", "texts of 400,000 characters", "llama", 10, 16, 8, rows=16, text=400_000),
    Case("none", "three requests", "llama", 3, 20, 60, rows=16),
    Case("none", "now and then one", "llama", 6, 20, 8, rows=16, gap=6),
)


def main() -> None:
    fields = open_checkpoint("smollm2").tokenizer_fields()
    assert fields is not None
    tokenizer = tokenizer_from_gguf(fields)
    recorded = [_simulated("qwen3-0.6b", rows, count) for rows, count in ((16, 64), (32, 200))]
    for case in CASES:
        recorded.append(_recorded(case, tokenizer))
        content = {"command": "python scripts/record_diagnoses.py", "commit": commit(), "cases": recorded}
        OUTPUT.write_text(json.dumps(content, indent=1) + "\n")
        print(f"{case.kind}: {case.name}", flush=True)


def _recorded(case: Case, tokenizer: Tokenizer) -> dict[str, Any]:
    args = EngineArgs(
        model=str(GOLDEN / case.model),
        skip_tokenizer_init=True,
        max_num_seqs=case.rows,
        num_gpu_blocks_override=case.blocks,
        block_size=8,
        max_model_len=case.prompt + case.output,
        enable_prefix_caching=False,
    )
    built = start_engine(args).built
    built.wait_until_compiled()
    try:
        vocab = built.engine.limits.vocab_size
        drawn = [
            folded(random_requests(case.num_requests, case.prompt, case.output, 0, repeat), vocab) for repeat in (0, 1)
        ]
        at_once = case._replace(name="warm-up", text=0)
        _run(built.engine, at_once, drawn[1], tokenizer, 0.0)  # compiles what the other meets
        _run(built.engine, at_once, drawn[1][:1], tokenizer, 0.0)
        alone = _run(built.engine, at_once._replace(name="alone"), drawn[1][:1], tokenizer, 0.0).seconds
        requests, warm_up = drawn
        _run(built.engine, case._replace(name="warm-up"), warm_up, tokenizer, case.gap * alone)
        run = _run(built.engine, case, requests, tokenizer, case.gap * alone)
        m = measured("jaxllm", case.name, "", requests, run, 0.0)
    finally:
        built.close()
    facts = {"command": case.made, "device": "1 x cpu (cpu)"}
    return _entry(case.kind, case.made, facts, m, case.rows)


def _run(engine: Engine, case: Case, requests: Sequence[WorkloadRequest], tokenizer: Tokenizer, gap: float) -> Run:
    stats, engine.times = engine.scheduler.stats, StepTimes()
    places: dict[str, int] = {}
    times: list[list[float]] = [[] for _ in requests]
    outputs: list[list[int]] = [[] for _ in requests]
    text = "The quick brown fox jumps over the lazy dog. " * (case.text // 45 + 1)
    start = time.perf_counter()
    sent = [start + place * gap for place in range(len(requests))]
    coming = iter(range(len(requests)))
    place = next(coming, None)
    while place is not None or engine.has_work:
        while place is not None and time.perf_counter() >= sent[place]:
            if case.text:
                tokenizer.encode(text[: case.text])
            request_id = f"{case.name}-{start}-{place}"
            places[request_id] = place
            params = SamplingParams(temperature=0.0, max_tokens=case.output, ignore_eos=True)
            engine.add(request_id, requests[place].prompt, params)
            place = next(coming, None)
            if case.text:
                break  # steps go on while the next text waits its turn
        if not engine.has_work:
            time.sleep(1e-4)
            continue
        updates = engine.step()
        now = time.perf_counter()
        for update in updates:
            at = places[update.request_id]
            outputs[at] += update.token_ids
            times[at] += [now - sent[at]] * len(update.token_ids)
    seconds = time.perf_counter() - start
    return Run(seconds, outputs, times, step_figures(engine.times, stats, engine.scheduler.stats))


def _simulated(model: str, rows: int, count: int) -> dict[str, Any]:
    """The real scheduler before the cost model: a step takes the longer of device and host."""
    _, device = find_devices("H200")
    shape = shape_of(read_model(model), model)
    config = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=8192, max_model_len=4096)
    scheduler = Scheduler(config, BlockPool(20_000, 16), KVGroups())
    requests = random_requests(count, 128, 128, 0)
    for i, request in enumerate(requests):
        scheduler.add(Request(str(i), request.prompt, request.output_len))
    times: list[list[float]] = [[] for _ in requests]
    now = host = wait = 0.0
    num_steps = num_requests = 0
    peak = 0.0
    for batch in _batches(scheduler):
        host_s = (device.host_us + device.host_request_us * batch.num_requests) * 1e-6
        took = step_time(shape, device, _load_of(batch)).total
        host, wait, now = host + host_s, wait + max(0.0, took - host_s), now + max(took, host_s)
        num_steps, num_requests = num_steps + 1, num_requests + batch.num_requests
        peak = max(peak, scheduler.stats.kv_usage)
        for update in scheduler.update(batch, [7] * batch.num_requests):
            times[int(update.request_id)] += [now] * len(update.token_ids)
    figures = StepFigures(
        num_steps=num_steps,
        mean_batch=num_requests / num_steps,
        kv_utilisation=0.0,
        kv_usage_peak=peak,
        padding_share=0.0,
        num_recomputed_tokens=0,
        num_discarded_tokens=0,
        num_preemptions=scheduler.stats.num_preemptions,
        schedule_ms=0.0,
        build_ms=0.0,
        execute_ms=1e3 * host / num_steps,
        update_ms=0.0,
        wait_ms=1e3 * wait / num_steps,
    )
    run = Run(now, [[7] * len(each) for each in times], times, figures)
    made = (
        f"the real scheduler before the cost model of an H200: {model}, {count} requests of 128 and 128 tokens, "
        f"sent at once; --max-num-seqs {rows}"
    )
    m = measured("jaxllm", f"{model}, {rows} rows", "", requests, run, 0.0)
    return _entry("scheduling", made, {"device": "1 x NVIDIA H200 (gpu)", "model": model}, m, rows)


def _batches(scheduler: Scheduler) -> Iterator[ScheduledBatch]:
    pending: deque[ScheduledBatch] = deque()
    while scheduler.has_work:
        batch = scheduler.schedule()
        if batch is not None:
            pending.append(batch)
        yield pending.popleft()


def _load_of(batch: ScheduledBatch) -> StepLoad:
    decoding = [item for item in batch.items if item.count == 1]
    prompts = [item for item in batch.items if item.count > 1]
    return StepLoad(
        len(decoding),
        sum(item.start + item.count for item in decoding),
        sum(item.count for item in prompts),
        sum(item.count * (item.start + item.count / 2) for item in prompts),
        len(prompts),
    )


def _entry(kind: str, made: str, facts: dict[str, Any], m: Measurement, rows: int) -> dict[str, Any]:
    assert isinstance(m.latencies, Latencies)
    result = as_json(m, detailed=False)
    for name in ("digest", "output_digest", "warm_up_seconds"):
        result.pop(name, None)
    return {"kind": kind, "made": made, "facts": facts, "row": {"max_num_seqs": rows}, "result": result}


if __name__ == "__main__":
    main()
