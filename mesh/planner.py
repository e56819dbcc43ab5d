"""Mesh shapes for a model, devices and traffic: what fits, how fast it is, which to take. Knows numbers; no models.

A shape is (data, tensor, pipe): `data` copies of the model, each over tensor x pipe devices. First the target, then the
batch: the largest batch of a copy whose mean time per token and time to first token keep the targets, as far as the KV
pool holds it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jaxllm.mesh.cost_model import DeviceSpec, ModelShape, Shard, StepLoad, StepTime, stage_layers, step_time

PROCESS_SHARE = 0.95  # of a card's memory, what jax takes by default in our command line: see targets.py
MOST_REQUESTS = 1024  # of a copy: beyond it the host's scheduling takes longer than a step
USUAL_REQUESTS = 256  # the engine's own default
USUAL_BUDGET = 8192
_ENOUGH = 0.95  # without a target: the smallest batch that has this share of the largest throughput
_GRID = 64  # the engine rounds its number of blocks down to a 64th of its size
_BUDGETS = (256, 384, 512, 768, 1024, 2048, 4096, 8192)  # sizes that steps are padded to
_FEW_REQUESTS = 8


@dataclass(frozen=True, slots=True, order=True)
class MeshShape:
    """Copies of the model, tensor ranks, and stages."""

    data: int
    tensor: int
    pipe: int = 1

    def __str__(self) -> str:
        stages = f" x pipe={self.pipe}" if self.pipe > 1 else ""
        return f"data={self.data} x tensor={self.tensor}{stages}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What requests are like: mean tokens, requests a second over all copies (None: as many as can be), targets."""

    input_len: float = 1024
    output_len: float = 128
    request_rate: float | None = None
    ttft: float | None = None  # seconds
    tpot: float | None = None

    @property
    def mean_context(self) -> float:
        return self.input_len + self.output_len / 2

    @property
    def longest(self) -> int:
        return math.ceil(self.input_len + self.output_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine is started with."""

    max_num_seqs: int | None = None  # of a copy; None: to be chosen
    token_budget: int = USUAL_BUDGET
    block_size: int = 16
    memory_share: float = 0.9  # gpu_memory_utilization
    stages: bool = True  # whether a shape with stages may be named the best


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Where the memory of the fullest device goes, in bytes, and what the pool of a copy holds."""

    weights: int
    temporaries: int
    block_bytes: int
    num_blocks: int
    num_tokens: int
    largest_batch: int  # requests of the traffic's length

    @property
    def pool(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A shape at a batch: `batch` requests run in each copy. Seconds; `tpot` holds what prompts between steps take."""

    batch: int
    step: StepTime  # of decoding alone
    ttft: float
    tpot: float
    tokens_per_second: float  # output, of all copies
    tokens_per_device: float
    requests_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to start the engine with."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One mesh shape: its memory, and how it does. Why it cannot be, where it cannot, and then nothing else."""

    mesh: MeshShape
    memory: MemoryUse | None = None
    operating: Point | None = None  # at the traffic's rate, or at the largest batch that keeps the targets
    most: Point | None = None  # at the largest batch that keeps the targets, whatever the rate
    alone: Point | None = None  # one request at a time in each copy
    curve: tuple[Point, ...] = ()
    keeps_targets: bool = False
    carries_rate: bool = False
    settings: Settings | None = None
    warnings: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every shape, and the best of those that keep the targets; None where none does."""

    shape: ModelShape
    device: DeviceSpec
    num_devices: int
    traffic: Traffic
    limits: Limits
    candidates: tuple[Candidate, ...]
    for_throughput: Candidate | None = None
    for_latency: Candidate | None = None
    why: str = ""

    def may_be_best(self) -> list[Candidate]:
        """Lists the shapes that fit and that the engine can run."""
        fitting = [c for c in self.candidates if c.operating is not None]
        return [c for c in fitting if c.mesh.pipe == 1 or self.limits.stages]


def mesh_shapes(num_devices: int) -> list[MeshShape]:
    """Lists every way to lay out all devices, those with the most copies first."""
    sizes = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    shapes = [
        MeshShape(num_devices // tensor // pipe, tensor, pipe)
        for tensor in sizes
        for pipe in sizes
        if num_devices % (tensor * pipe) == 0
    ]
    return sorted(shapes, key=lambda mesh: (mesh.pipe, -mesh.data))


def make_plan(
    shape: ModelShape, device: DeviceSpec, num_devices: int, traffic: Traffic, limits: Limits | None = None
) -> Plan:
    """Examines every mesh shape and names the best."""
    limits = limits or Limits()
    found = tuple(examine(shape, device, mesh, traffic, limits) for mesh in mesh_shapes(num_devices))
    plan = Plan(shape=shape, device=device, num_devices=num_devices, traffic=traffic, limits=limits, candidates=found)
    able = [c for c in plan.may_be_best() if c.keeps_targets and c.carries_rate]
    if not able:
        return replace(plan, why=_why_none(plan))
    fast = max(able, key=_throughput)
    quick = min(able, key=lambda c: (_latency(c, traffic), c.mesh.pipe))
    return replace(plan, for_throughput=fast, for_latency=quick, why=_why(plan, fast, quick))


def examine(shape: ModelShape, device: DeviceSpec, mesh: MeshShape, traffic: Traffic, limits: Limits) -> Candidate:
    """Finds what one mesh shape does with the traffic."""
    if reason := _impossible(shape, mesh):
        return Candidate(mesh=mesh, reason=reason)
    memory = memory_use(shape, device, mesh, traffic, limits)
    if memory.largest_batch < 1:
        return Candidate(mesh=mesh, memory=memory, reason=_too_full(device, memory, traffic, limits))
    most = min(memory.largest_batch, limits.max_num_seqs or MOST_REQUESTS)

    def at(batch: int) -> Point:
        return point(shape, device, mesh, traffic, limits, batch)

    batch, keeps = _largest_within(at, most, traffic)
    if keeps and traffic.tpot is None and traffic.ttft is None and limits.max_num_seqs is None:
        batch = _least_for(at, batch, _ENOUGH * at(batch).requests_per_second)
    within, carries = batch, True
    if traffic.request_rate is not None:
        carries = at(batch).requests_per_second >= traffic.request_rate
        batch = _least_for(at, batch, traffic.request_rate) if carries else batch
    operating = at(batch)
    settings = _settings(shape, device, mesh, traffic, limits, operating, within)
    return Candidate(
        mesh=mesh,
        memory=memory,
        operating=operating,
        most=at(within),
        alone=at(1),
        curve=tuple(at(b) for b in _batches(most)),
        keeps_targets=keeps,
        carries_rate=carries,
        settings=settings,
        warnings=tuple(_warnings(shape, device, mesh, memory, limits, traffic)),
    )


def memory_use(shape: ModelShape, device: DeviceSpec, mesh: MeshShape, traffic: Traffic, limits: Limits) -> MemoryUse:
    """Counts as the engine's start does: weights, the bound of the temporaries, and blocks from what is left."""
    shard, stages = shape.shards[mesh.tensor], stage_layers(shape.num_layers, mesh.pipe)
    weights = max(
        len(layers) * shard.layer_bytes
        + (shard.embedding_bytes if i == 0 or (shape.tied and i == mesh.pipe - 1) else 0)
        + (shard.head_bytes if i == mesh.pipe - 1 else 0)
        for i, layers in enumerate(stages)
    )
    weights = round(weights)
    per_token, per_request, always = shard.temporary_bytes
    rows = limits.max_num_seqs or USUAL_REQUESTS
    temporaries = limits.token_budget * per_token + rows * per_request + always
    share = len(stages[0]) / shape.num_layers
    block_bytes = round(shard.kv_slot_bytes * limits.block_size * share)
    free = int(device.memory_bytes * PROCESS_SHARE * limits.memory_share) - weights - temporaries
    num_blocks = _on_grid(max(free, 0) // block_bytes)
    usable = max(num_blocks - 1, 0)  # block 0 is reserved
    return MemoryUse(
        weights=weights,
        temporaries=temporaries,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        num_tokens=int(usable * limits.block_size / len(shape.group_windows)),
        largest_batch=usable // blocks_of(shape, traffic.longest, limits),
    )


def blocks_of(shape: ModelShape, num_tokens: int, limits: Limits) -> int:
    """Counts the blocks, of all KV groups, that a request holds at its end; windows give back what is behind them."""
    last = -(-num_tokens // limits.block_size)
    return sum(
        last - (0 if window is None else max(num_tokens - window, 0) // limits.block_size)
        for window in shape.group_windows
    )


def point(
    shape: ModelShape, device: DeviceSpec, mesh: MeshShape, traffic: Traffic, limits: Limits, batch: int
) -> Point:
    """Gives what a shape does with `batch` requests running in each copy, others taking the place of those that end.

    While a request decodes its tokens, as many prompts as the batch has requests pass through the steps; each step has
    its share of them. A first token takes half a step of waiting and the steps of its prompt.
    """
    decoding = StepLoad(batch, batch * traffic.mean_context)
    alone = step_time(shape, device, decoding, mesh.tensor, mesh.pipe, mesh.data)
    tokens_between = batch * traffic.input_len / max(traffic.output_len, 1)
    tpot = _with_prompts(shape, device, mesh, traffic, decoding, tokens_between, limits.token_budget)
    room = max(limits.token_budget - batch, 1)
    num_chunks = math.ceil(traffic.input_len / room)
    chunk = _with_prompts(shape, device, mesh, traffic, decoding, traffic.input_len / num_chunks, whole=True)
    ttft = tpot / 2 + num_chunks * chunk
    tokens = mesh.data * batch / tpot
    return Point(
        batch=batch,
        step=alone,
        ttft=ttft,
        tpot=tpot,
        tokens_per_second=tokens,
        tokens_per_device=tokens / (mesh.data * mesh.tensor * mesh.pipe),
        requests_per_second=tokens / max(traffic.output_len, 1),
    )


def _with_prompts(
    shape: ModelShape,
    device: DeviceSpec,
    mesh: MeshShape,
    traffic: Traffic,
    decoding: StepLoad,
    num_tokens: float,
    budget: int = 0,
    *,
    whole: bool = False,
) -> float:
    """The mean of steps that compute `num_tokens` of prompts each, or a step that does (`whole`).

    Prompts come whole where they fit: a step in which one is computed is followed by steps without any. All copies run
    one program, so that a prompt of one makes the step longer for all.
    """
    size = num_tokens if whole else max(num_tokens, min(traffic.input_len, budget))
    load = replace(
        decoding,
        num_prompt_tokens=size,
        prompt_pairs=size * traffic.input_len / 2,
        num_prompts=size / max(traffic.input_len, 1),
    )
    mixed = step_time(shape, device, load, mesh.tensor, mesh.pipe, mesh.data).total
    if whole:
        return mixed
    share = 1 - (1 - num_tokens / size) ** mesh.data
    without = step_time(shape, device, decoding, mesh.tensor, mesh.pipe, mesh.data).total
    return share * mixed + (1 - share) * without


def _impossible(shape: ModelShape, mesh: MeshShape) -> str:
    if mesh.tensor not in shape.shards:
        return shape.refused.get(mesh.tensor, f"the model cannot be split over {mesh.tensor} tensor ranks")
    if mesh.pipe > shape.num_layers:
        return f"{mesh.pipe} stages are more than the {shape.num_layers} layers"
    return ""


def _too_full(device: DeviceSpec, memory: MemoryUse, traffic: Traffic, limits: Limits) -> str:
    share = device.memory_bytes * PROCESS_SHARE * limits.memory_share
    need = f"{gb(memory.weights)} of weights and {gb(memory.temporaries)} of temporaries"
    if memory.num_blocks <= 1:
        return f"{need} do not fit {gb(share)} ({limits.memory_share:.0%} of what a process has of {device.name})"
    return f"{need} leave {memory.num_tokens:,} KV tokens, fewer than a request's {traffic.longest:,}"


def _largest_within(at: Callable[[int], Point], most: int, traffic: Traffic) -> tuple[int, bool]:
    """The largest batch that keeps both targets; 1 and False where none does. Both times grow with the batch."""

    def keeps(batch: int) -> bool:
        p = at(batch)
        return (traffic.tpot is None or p.tpot <= traffic.tpot) and (traffic.ttft is None or p.ttft <= traffic.ttft)

    if not keeps(1):
        return 1, False
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low, True


def _least_for(at: Callable[[int], Point], most: int, rate: float) -> int:
    """The smallest batch up to `most` with which so many requests a second end."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle).requests_per_second >= rate else (middle, high)
    return high


def _settings(
    shape: ModelShape,
    device: DeviceSpec,
    mesh: MeshShape,
    traffic: Traffic,
    limits: Limits,
    operating: Point,
    within: int,
) -> Settings:
    """Rows for the batch and for what arrivals at random add to it; a budget for the target.

    With arrivals at random the number of requests at once is Poisson's, so that three roots above the mean are enough.
    The batch keeps the mean time per token; the budget keeps the longest step within twice that.
    """
    rows = within
    if traffic.request_rate is not None:
        rows = min(within, math.ceil(operating.batch + 3 * math.sqrt(operating.batch)))
    rows = limits.max_num_seqs or rows
    budget = limits.token_budget
    if (target := traffic.tpot) is not None:
        decoding = StepLoad(operating.batch, operating.batch * traffic.mean_context)

        def fits(size: int) -> bool:
            room = max(size - operating.batch, 1)
            return _with_prompts(shape, device, mesh, traffic, decoding, room, whole=True) <= 2 * target

        sizes = [size for size in _BUDGETS if operating.batch < size <= limits.token_budget]
        budget = next((size for size in reversed(sizes) if fits(size)), sizes[0] if sizes else budget)
    return Settings(max_num_seqs=rows, max_num_batched_tokens=budget, block_size=limits.block_size)


def _warnings(
    shape: ModelShape, device: DeviceSpec, mesh: MeshShape, memory: MemoryUse, limits: Limits, traffic: Traffic
) -> Iterator[str]:
    shard = shape.shards[mesh.tensor]
    if mesh.tensor > device.node_size:
        link, num_sums = device.between_nodes, shape.sums_per_layer * shape.num_layers
        yield (
            f"tensor={mesh.tensor} crosses nodes of {device.node_size}: {num_sums} all-reduces a step at "
            f"{link.latency_us:.0f} us and {link.bandwidth / 1e9:.0f} GB/s; keep tensor within a node, put "
            "data or pipe between nodes"
        )
    read = max(inputs * outputs for inputs, outputs in shape.products(shard)) * shape.itemsize / device.read_bandwidth
    if mesh.tensor > 1 and read < device.product_us * 1e-6:
        yield (
            f"shards are too small: the largest product of a layer is read in {read * 1e6:.1f} us, less than the "
            f"{device.product_us:.1f} us that a product takes in any case; use fewer tensor ranks"
        )
    if memory.largest_batch < _FEW_REQUESTS:
        yield (
            f"weights leave too little KV: {memory.num_tokens:,} tokens hold {memory.largest_batch} requests of "
            f"{traffic.longest:,}; split over more devices, or lower --max-num-batched-tokens, or "
            "--kv-cache-dtype fp8"
        )
    if limits.max_num_seqs is not None and limits.max_num_seqs > memory.largest_batch:
        yield (
            f"max_num_seqs {limits.max_num_seqs} exceeds what the pool holds: {memory.num_tokens:,} KV tokens are "
            f"{memory.largest_batch} requests of {traffic.longest:,}; beyond them requests are preempted"
        )
    if mesh.pipe > 1 and not limits.stages:
        yield "the engine does not run stages yet: --pipeline-parallel-size is refused"
    if empty := _padding(shape, shard, mesh.tensor):
        yield empty


def _padding(shape: ModelShape, shard: Shard, tensor: int) -> str:
    whole = shape.shards.get(1)
    if whole is None or shard.num_kv_heads * tensor == whole.num_kv_heads:
        return ""
    held, needed = shard.num_kv_heads * tensor, whole.num_kv_heads
    return f"{held} KV heads are held where the model has {needed}: the pool holds {needed / held:.0%} of what it might"


def _throughput(candidate: Candidate) -> float:
    assert candidate.most is not None
    return candidate.most.tokens_per_second


def _latency(candidate: Candidate, traffic: Traffic) -> float:
    """Seconds of a whole request: at the traffic's rate, or alone."""
    p = candidate.alone if traffic.request_rate is None else candidate.operating
    assert p is not None
    return p.ttft + max(traffic.output_len - 1, 0) * p.tpot


def _why(plan: Plan, fast: Candidate, quick: Candidate) -> str:
    assert fast.most is not None
    assert fast.memory is not None
    p = fast.most
    others = [c for c in plan.may_be_best() if c.keeps_targets and c.mesh != fast.mesh]
    parts = {"reading weights": p.step.weights, "reading KV": p.step.kv, "multiplying": p.step.compute}
    parts |= {"all-reduces": p.step.all_reduce, "launches": p.step.kernels, "the pipeline's bubble": p.step.bubble}
    largest = max(parts, key=lambda name: parts[name])
    said = (
        f"{fast.mesh} gives up to {p.tokens_per_second:,.0f} output tokens/s with {p.batch} requests in each copy: "
        f"{parts[largest] / p.step.total:.0%} of a step goes to {largest}"
    )
    if others:
        second = max(others, key=_throughput)
        assert second.most is not None
        assert second.memory is not None
        o = second.most
        said += (
            f"; {second.mesh} comes next with {o.tokens_per_second:,.0f} (all-reduces {_share(o)} against {_share(p)}, "
            f"KV for {second.memory.largest_batch * second.mesh.data:,} requests against "
            f"{fast.memory.largest_batch * fast.mesh.data:,})"
        )
    return said + ("" if quick.mesh == fast.mesh else f"; a single request is answered soonest by {quick.mesh}")


def _share(p: Point) -> str:
    return f"{p.step.all_reduce / p.step.total:.0%}"


def _why_none(plan: Plan) -> str:
    t, fitting = plan.traffic, plan.may_be_best()
    if not fitting:
        least = min((c.memory.weights for c in plan.candidates if c.memory is not None), default=0)
        share = plan.device.memory_bytes * PROCESS_SHARE * plan.limits.memory_share
        return f"no shape fits: each device would hold {gb(least)} of weights at least, and has {gb(share)}"
    keeping = [c for c in fitting if c.keeps_targets]
    if not keeping:
        best = min(fitting, key=lambda c: c.alone.tpot if c.alone else math.inf)
        assert best.alone is not None
        return (
            f"no shape keeps the targets: {best.mesh} takes TTFT {best.alone.ttft * 1e3:,.1f} ms and TPOT "
            f"{best.alone.tpot * 1e3:.2f} ms with one request in each copy"
        )
    most = max(c.most.requests_per_second for c in keeping if c.most)
    return f"no shape carries {t.request_rate:g} requests/s within the targets: the most is {most:.2f}"


def _batches(most: int) -> Sequence[int]:
    sizes = [2**i for i in range(11) if 2**i < most]
    return [*sizes, most]


def _on_grid(num_blocks: int) -> int:
    step = 2 ** max(0, num_blocks.bit_length() - int(math.log2(_GRID)) - 1)
    return num_blocks // step * step


def gb(num_bytes: float) -> str:
    """Bytes for people, in powers of 1000 as data sheets have them."""
    return f"{num_bytes / 1e9:,.1f} GB"
