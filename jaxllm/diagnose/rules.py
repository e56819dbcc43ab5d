"""Evidence -> what limits the engine, which flag to change, and what that should bring. Knows figures; reads nothing.

Looked at in this order; the first that holds is named:

1. The engine idles: steps run for less than 80% of the time. Work that waits outside of it then makes the *input* the
   limit (tokenizer, HTTP front), and so do arrivals, if steps run for 30% of the time or more. Below, it is unloaded.
2. *memory*: the KV pool was full, or had no room for one more request, and requests wait or were preempted.
3. Nothing waits, and few rows are in use: none. It keeps up.
4. *scheduling*: the host is blocked on the device for less than a tenth of a step; or all of few rows are in use, and
   requests wait beside free KV.
5. *compute*: requests wait for a device that is busy with full steps.
"""

from dataclasses import dataclass
from typing import Literal

from jaxllm.config.errors import InputError
from jaxllm.diagnose.evidence import Evidence

Kind = Literal["none", "memory", "compute", "scheduling", "input"]

_BUSY, _LOADED = 0.8, 0.3
_POOL_FULL = 0.9
_BLOCKED = 0.1
_FEW_ROWS, _FEW_ROWS_CPU = 64, 8  # below it a step costs what reading the weights costs
_MOST_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What limits, the numbers that say so, what to change, and what that should bring."""

    kind: Kind
    cause: str
    evidence: tuple[str, ...]
    change: str = ""
    effect: str = ""


def diagnose(e: Evidence) -> Diagnosis:
    """Names what limits an engine."""
    if e.busy is not None and e.busy < _BUSY:
        return _idle(e, e.busy)
    if _pool_is_full(e) and (e.num_preemptions or e.waiting >= 1):
        return _memory(e)
    if e.waiting < 1 and not (e.is_full and e.running >= _few(e)):
        return Diagnosis(kind="none", cause="nothing waits: the engine keeps up", evidence=(*_load(e), *_pool(e)))
    if e.host_ms is not None and e.wait_ms is not None and e.wait_ms < _BLOCKED * (e.host_ms + e.wait_ms):
        return _host(e, e.host_ms, e.wait_ms)
    if e.is_full and e.running < _few(e):
        return _rows(e)
    return _compute(e)


def _idle(e: Evidence, busy: float) -> Diagnosis:
    seen = (f"steps run {busy:.0%} of the time", *_load(e), *_pool(e))
    if e.waiting >= 1:
        return Diagnosis(
            kind="input",
            cause="the engine idles while requests wait before it: tokenizer or HTTP front",
            evidence=seen,
            change="send token ids instead of texts (--skip-tokenizer-init), shorter texts, or through several fronts",
            effect=f"up to {1 / max(busy, 0.01):.1f} times as many tokens a second, then the device is the limit",
        )
    if busy < _LOADED:
        return Diagnosis(kind="none", cause="the engine is hardly used", evidence=seen)
    return Diagnosis(
        kind="input",
        cause="requests arrive more slowly than the engine answers them",
        evidence=(*seen, f"{e.num_requests / e.seconds:.2f} requests/s arrive"),
        change="nothing in the engine: send more at once (the client's concurrency or rate)",
        effect=f"room for {1 / busy:.1f} times the rate before requests wait",
    )


def _memory(e: Evidence) -> Diagnosis:
    computed = max(e.num_prompt_tokens + e.num_output_tokens, 1)
    seen = [*_load(e), *_pool(e)]
    if e.num_preemptions:
        seen.append(
            f"{e.num_preemptions:,} preemptions; {e.num_recomputed_tokens:,} tokens computed again "
            f"({e.num_recomputed_tokens / computed:.0%} of {computed:,})"
        )
    return Diagnosis(
        kind="memory",
        cause="the KV pool is full"
        if (e.kv_peak or 0) >= _POOL_FULL
        else "the KV pool has no room for one more request",
        evidence=tuple(seen),
        change=(
            "--kv-cache-dtype fp8 or a higher --gpu-memory-utilization (more KV), a larger --tensor-parallel-size; "
            f"without more memory --max-num-seqs {max(1, int(e.running))}, so that nothing is preempted"
        ),
        effect=(
            "twice the KV tokens run up to twice as many requests at once"
            + (
                f" and spare {e.num_recomputed_tokens / computed:.0%} of computing again"
                if e.num_recomputed_tokens
                else ""
            )
        ),
    )


def _host(e: Evidence, host_ms: float, wait_ms: float) -> Diagnosis:
    more = min(2 * e.rows, _MOST_ROWS) if e.rows and e.is_full and _pool_allows(e, 2) else None
    return Diagnosis(
        kind="scheduling",
        cause="the host is slower than the device",
        evidence=(
            f"host work {host_ms:.2f} ms a step, blocked on the device {wait_ms:.2f} ms",
            *_load(e),
            *_pool(e),
        ),
        change=(
            f"--max-num-seqs {more}: more tokens for each step's fixed work"
            if more
            else "--no-enable-prefix-caching where prompts share nothing, fewer options per request, a faster host"
        ),
        effect=_gain(e, more) if more else f"at most the host's {host_ms:.2f} ms a step, down to the device's own time",
    )


def _rows(e: Evidence) -> Diagnosis:
    assert e.rows is not None
    wanted = min(_MOST_ROWS, _power_above(min(e.running + e.waiting, 4 * e.rows)))
    while wanted > 2 * e.rows and not _pool_allows(e, wanted / e.rows):
        wanted //= 2
    return Diagnosis(
        kind="scheduling",
        cause=f"all {e.rows} rows are in use and requests wait, though the KV pool has room",
        evidence=(*_load(e), *_pool(e)),
        change=f"--max-num-seqs {wanted}",
        effect=_gain(e, wanted),
    )


def _compute(e: Evidence) -> Diagnosis:
    seen = [*_load(e), *_pool(e)]
    if e.host_ms is not None and e.wait_ms is not None:
        step = e.host_ms + e.wait_ms
        seen.append(f"blocked on the device {e.wait_ms:.2f} of {step:.2f} ms a step ({e.wait_ms / step:.0%})")
    if e.num_prompt_tokens > 8 * e.num_output_tokens:
        return Diagnosis(
            kind="compute",
            cause="the device is busy with prompts",
            evidence=(*seen, f"{e.num_prompt_tokens / max(e.num_output_tokens, 1):.0f} prompt tokens to one of output"),
            change="more devices (--data-parallel-size); --target-tpot-ms, if the tokens between are too far apart",
            effect="throughput in proportion to the devices; a target moves time from tokens to prompts and adds none",
        )
    more = min(2 * (e.rows or 0), _MOST_ROWS) if e.is_full and _pool_allows(e, 2) else None
    return Diagnosis(
        kind="compute",
        cause="the device is busy with full steps",
        evidence=tuple(seen),
        change=(
            f"--max-num-seqs {more}, if the time per token may grow; else more devices (--data-parallel-size)"
            if more
            else "more devices (--data-parallel-size), or fewer bytes (--kv-cache-dtype fp8)"
        ),
        effect=_gain(e, more) if more else "throughput in proportion to the copies",
    )


def _gain(e: Evidence, rows: int) -> str:
    """By the cost model where model and device are known, else the bound."""
    bound = (
        f"at most {rows / max(e.running, 1):.1f} times the tokens a second, where a step costs what its weights cost"
    )
    if e.model is None or e.device is None:
        return bound
    try:
        from jaxllm.mesh.planner import Limits, MeshShape, Traffic, point
        from jaxllm.planning.devices import find_devices
        from jaxllm.planning.model_shape import read_model, shape_of

        _, device = find_devices(e.device)
        shape = shape_of(read_model(e.model), e.model)
    except InputError:  # a device or a model that nobody described
        return bound
    count = max(e.num_requests, 1)
    traffic = Traffic(input_len=e.num_prompt_tokens / count, output_len=e.num_output_tokens / count)
    mesh = MeshShape(e.copies, 1)
    now, then = (point(shape, device, mesh, traffic, Limits(), round(b)) for b in (e.running, rows))
    return (
        f"by the cost model of the {device.name} {then.tokens_per_second / now.tokens_per_second - 1:+.0%} tokens/s, "
        f"and {then.tpot / now.tpot - 1:+.0%} time per token"
    )


def _load(e: Evidence) -> tuple[str, ...]:
    rows = f" of {e.rows} rows" if e.rows else ""
    rows += f" of each of {e.copies} data ranks" if e.copies > 1 else ""
    said = [
        f"{e.running:.1f}{rows} running in the mean, {e.waiting:.1f} waiting",
        f"{e.output_rate:,.0f} output tokens/s",
    ]
    if e.tpot_ms is not None:
        said.append(f"{e.tpot_ms:.1f} ms per token")
    return tuple(said)


def _pool(e: Evidence) -> tuple[str, ...]:
    return () if e.kv_peak is None else (f"KV pool at most {e.kv_peak:.0%} full",)


def _pool_is_full(e: Evidence) -> bool:
    """Where rows are free, a pool is full as soon as one more request of the usual size would not fit."""
    if e.kv_peak is None:
        return False
    one_more = e.kv_peak * (1 + 1 / max(e.running, 1.0))
    return e.kv_peak >= _POOL_FULL or (e.rows is not None and not e.is_full and one_more > 1)


def _pool_allows(e: Evidence, factor: float) -> bool:
    return e.kv_peak is None or e.kv_peak * factor <= _POOL_FULL


def _few(e: Evidence) -> int:
    return _FEW_ROWS_CPU if e.is_cpu else _FEW_ROWS


def _power_above(number: float) -> int:
    size = 1
    while size < number:
        size *= 2
    return size
