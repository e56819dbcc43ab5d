"""How long a step takes, from bytes, FLOPs and messages. Knows a model and a device as plain numbers; no arrays.

A product of M rows reads its weights and multiplies by them. Neither hides the other wholly, so that it takes

    latency + (read^p + multiply^p)^(1/p),   read = bytes / bandwidth,   multiply = 2 M inputs outputs / FLOPs a second

for each product by itself, with its own M: the head has a row for each request, all others one for each token. Beside
the products a step reads the KV of its contexts, multiplies prompts with their contexts, moves each token's features
through memory between kernels, launches kernels, and sums over tensor ranks.
"""

import itertools
import json
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one tensor rank holds of a model. Heads count repeated and empty places; bytes are those of its arrays."""

    num_q_heads: int
    num_kv_heads: int
    d_ff: int
    vocab_rows: int
    layer_bytes: float  # of a layer
    embedding_bytes: int
    head_bytes: int  # without the embedding, where that is the head too
    kv_slot_bytes: int  # of one token in the layers of one KV group
    temporary_bytes: tuple[int, int, int]  # for each token, for each request, and in any case


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model as numbers. `shards` has a rank's share for each number of tensor ranks that can hold the model.

    `windows` has the sliding window of each layer, `group_windows` that of each KV group. `refused` says why other
    numbers of tensor ranks cannot be.
    """

    name: str
    num_layers: int
    d_model: int
    head_dim: int
    vocab_size: int
    max_position: int
    gated_mlp: bool
    sums_per_layer: int  # over the tensor ranks: 1 where attention and MLP stand side by side
    tied: bool
    itemsize: int
    kv_itemsize: int
    windows: tuple[int | None, ...]
    group_windows: tuple[int | None, ...]
    shards: Mapping[int, Shard]
    refused: Mapping[int, str]

    def products(self, shard: Shard) -> tuple[tuple[int, int], ...]:
        """Lists inputs and outputs of a layer's products on a rank."""
        query, keys = shard.num_q_heads * self.head_dim, shard.num_kv_heads * self.head_dim
        up = (2 if self.gated_mlp else 1) * shard.d_ff
        D = self.d_model
        return ((D, query + 2 * keys), (query, D), (D, up), (shard.d_ff, D))

    def features(self, shard: Shard) -> int:
        """Counts the numbers that a token writes or reads in a layer between the products and other kernels."""
        query, keys = shard.num_q_heads * self.head_dim, shard.num_kv_heads * self.head_dim
        up = (2 if self.gated_mlp else 1) * shard.d_ff
        return 2 * (query + 2 * keys) + 2 * query + 2 * up + 2 * shard.d_ff + 8 * self.d_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How `ranks` devices sum an array: microseconds that any size takes, and bytes a second beyond them."""

    ranks: int
    latency_us: float
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A device as numbers. What is not `measured` is a vendor's figure times an efficiency; `source` tells which.

    `blend` is the p of a product's time. `links` has an entry for each number of ranks that is known within a node of
    `node_size` devices, and `between_nodes` serves for more.
    """

    name: str
    measured: bool
    source: str
    memory_bytes: int
    read_bandwidth: float  # of weights
    copy_bandwidth: float  # of KV and features
    matmul_flops: float
    attention_flops: float  # of prompts over their contexts
    blend: float
    product_us: float  # of each product, however small
    kernel_us: float  # of each other kernel
    kernels_per_layer: int
    mixed_layer_us: float  # of a layer in a step with prompts, whose kernels are not one graph
    request_layer_us: float  # of a request in a layer, where attention takes one after the other (a CPU)
    host_us: float  # of a step, hidden behind the device's step before it
    host_request_us: float  # of each request in it
    node_size: int
    links: tuple[Link, ...]
    between_nodes: Link

    def link(self, ranks: int) -> Link:
        """Gives the link of so many ranks: the next larger one that is known, or that between nodes."""
        if ranks > self.node_size:
            return self.between_nodes
        return next((link for link in self.links if link.ranks >= ranks), self.links[-1])

    def as_json(self) -> dict[str, Any]:
        """Gives what `device_from` reads."""
        return asdict(self)


def device_from(described: Mapping[str, Any]) -> DeviceSpec:
    """Reads a description of a device.

    Raises:
        ValueError: a field is missing, unknown, or not a number where one belongs.
    """
    known = {field.name for field in fields(DeviceSpec)}
    if wrong := sorted(known ^ described.keys()):
        raise ValueError(f"{'missing' if wrong[0] in known else 'unknown'} field {wrong[0]!r}")
    values = dict(described)
    try:
        values["links"] = tuple(Link(**link) for link in values["links"])
        values["between_nodes"] = Link(**values["between_nodes"])
    except TypeError as error:
        raise ValueError(f"links: {str(error).removeprefix('Link.')}") from None
    if not values["links"]:
        raise ValueError("links is empty: describe at least one")
    for field in fields(DeviceSpec):
        value = values[field.name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if field.type in (int, float) and not (is_number and value >= 0):
            raise ValueError(f"{field.name} must be a number, at least 0, got {value!r}")
    for name in ("memory_bytes", "read_bandwidth", "copy_bandwidth", "matmul_flops", "attention_flops", "node_size"):
        if not values[name] > 0:
            raise ValueError(f"{name} must be above 0")
    if values["blend"] < 1:
        raise ValueError(f"blend must be at least 1, got {values['blend']}")
    return DeviceSpec(**values)


def read_device(text: str) -> DeviceSpec:
    """Reads a device from JSON.

    Raises:
        ValueError: it is none.
    """
    described = json.loads(text)
    if not isinstance(described, dict):
        raise ValueError("a device is described by a JSON object")
    return device_from(described)


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes on one data rank: `num_requests` sample a token each.

    `context` is the KV that they read, in tokens summed over the requests; `num_prompt_tokens` come on top of a token
    for each of the decoding requests, and see `prompt_pairs` keys.
    """

    num_decoding: int
    context: float
    num_prompt_tokens: float = 0.0
    prompt_pairs: float = 0.0
    num_prompts: float = 0.0

    @property
    def num_tokens(self) -> float:
        return self.num_decoding + self.num_prompt_tokens

    @property
    def num_sampled(self) -> float:
        return self.num_decoding + self.num_prompts


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by what they go to.

    `compute` is what multiplying takes beyond reading the weights, attention of prompts, and features' way through
    memory; `kernels` what launches take; `host` what the host takes beyond the device.
    """

    weights: float = 0.0
    kv: float = 0.0
    compute: float = 0.0
    kernels: float = 0.0
    all_reduce_latency: float = 0.0
    all_reduce_bytes: float = 0.0
    bubble: float = 0.0
    host: float = 0.0

    @property
    def all_reduce(self) -> float:
        return self.all_reduce_latency + self.all_reduce_bytes

    @property
    def total(self) -> float:
        return sum(_values(self))

    def parts(self) -> dict[str, float]:
        """Gives the parts by name."""
        return dict(zip(_PARTS, _values(self), strict=True))

    def __add__(self, other: "StepTime") -> "StepTime":
        return StepTime(*(mine + theirs for mine, theirs in zip(_values(self), _values(other), strict=True)))

    def times(self, factor: float) -> "StepTime":
        """Gives each part times a factor."""
        return StepTime(*(value * factor for value in _values(self)))


_PARTS = tuple(field.name for field in fields(StepTime))
_values = operator.attrgetter(*_PARTS)


def step_time(
    shape: ModelShape, device: DeviceSpec, load: StepLoad, tensor: int = 1, pipe: int = 1, data: int = 1
) -> StepTime:
    """Gives what a step takes over tensor x pipe devices for each of `data` copies, which one host prepares.

    With stages, requests and prompts are cut into as many equal parts, which follow each other through the stages: a
    request's next token comes when its part has passed all of them. What the longest stage takes beyond the mean of all
    is bubble, and so is what too few requests to fill the stages leave idle.
    """
    if pipe == 1:
        return _with_host(device, load, data, _stage(shape, device, load, tensor, range(shape.num_layers), True, True))
    num_parts = max(1, min(pipe, load.num_decoding + int(load.num_prompts > 0)))
    part = StepLoad(
        -(-load.num_decoding // num_parts),
        load.context / num_parts,
        load.num_prompt_tokens / num_parts,
        load.prompt_pairs / num_parts,
        load.num_prompts / num_parts,
    )
    stages = [
        _stage(shape, device, part, tensor, layers, i == 0, i == pipe - 1)
        for i, layers in enumerate(stage_layers(shape.num_layers, pipe))
    ]
    handing_on = pipe * _message(device, part.num_tokens * shape.d_model * shape.itemsize)
    busy = sum(stages, StepTime())  # one part through all stages: what each device does with `num_parts` of them, too
    longest = max(stage.total for stage in stages)
    idle = longest * pipe - busy.total
    return _with_host(device, load, data, busy + StepTime(bubble=idle + handing_on))


def stage_layers(num_layers: int, pipe: int) -> list[range]:
    """Deals consecutive layers to stages; the first ones get one more where they do not divide."""
    each, more = divmod(num_layers, pipe)
    starts = [i * each + min(i, more) for i in range(pipe + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def all_reduce_time(device: DeviceSpec, ranks: int, num_bytes: float) -> StepTime:
    """Gives what the sum of an array over ranks takes; a ring sends 2 (n - 1) / n of it."""
    if ranks == 1:
        return StepTime()
    link = device.link(ranks)
    sent = num_bytes * 2 * (ranks - 1) / ranks
    return StepTime(all_reduce_latency=link.latency_us * 1e-6, all_reduce_bytes=sent / link.bandwidth)


def _stage(
    shape: ModelShape, device: DeviceSpec, load: StepLoad, tensor: int, layers: range, is_first: bool, is_last: bool
) -> StepTime:
    shard, count = shape.shards[tensor], len(layers)
    num_sums = shape.sums_per_layer * count + (1 if is_first else 0)  # the embedding's look-up is one, too
    spent = all_reduce_time(device, tensor, load.num_tokens * shape.d_model * shape.itemsize).times(num_sums)
    read = multiplied = 0.0
    for inputs, outputs in shape.products(shard):
        once, both = _product(shape, device, load.num_tokens, inputs, outputs)
        read, multiplied = read + count * once, multiplied + count * (both - once)
    num_products = len(shape.products(shard)) * count
    if is_last:
        once, both = _product(shape, device, load.num_sampled, shape.d_model, shard.vocab_rows)
        read, multiplied, num_products = read + once, multiplied + both - once, num_products + 1
        spent += all_reduce_time(device, tensor, load.num_sampled * 8)  # the best token of each rank, with its value
    moved = load.num_tokens * shape.features(shard) * shape.itemsize * count / device.copy_bandwidth
    each_layer = device.kernels_per_layer * device.kernel_us + device.request_layer_us * load.num_sampled
    each_layer += device.mixed_layer_us if load.num_prompt_tokens else 0.0
    kv, attention = attention_seconds(shape, device, load, tensor, layers)
    return spent + StepTime(
        weights=read,
        kv=kv,
        compute=multiplied + moved + attention,
        kernels=1e-6 * (num_products * device.product_us + count * each_layer),
    )


def attention_seconds(
    shape: ModelShape, device: DeviceSpec, load: StepLoad, tensor: int = 1, layers: range | None = None
) -> tuple[float, float]:
    """Gives the part of a step that grows with its contexts: what reading KV takes, and what prompts' products take."""
    shard = shape.shards[tensor]
    context, pairs = _seen(shape, load, range(shape.num_layers) if layers is None else layers)
    kv_bytes = 2 * shard.num_kv_heads * shape.head_dim * shape.kv_itemsize * context
    flops = 4 * shard.num_q_heads * shape.head_dim * pairs
    return kv_bytes / device.copy_bandwidth, flops / device.attention_flops


def _product(shape: ModelShape, device: DeviceSpec, rows: float, inputs: int, outputs: int) -> tuple[float, float]:
    """Seconds that reading the weights takes, and reading and multiplying together."""
    read = inputs * outputs * shape.itemsize / device.read_bandwidth
    multiply = 2 * rows * inputs * outputs / device.matmul_flops
    return read, (read**device.blend + multiply**device.blend) ** (1 / device.blend)


def _seen(shape: ModelShape, load: StepLoad, layers: range) -> tuple[float, float]:
    """The keys that the requests read, and those that tokens of prompts multiply with, summed over the layers."""
    context = pairs = 0.0
    for window, count in Counter(shape.windows[layers.start : layers.stop]).items():
        if window is None:
            context, pairs = context + count * load.context, pairs + count * load.prompt_pairs
        else:
            context += count * min(load.context, load.num_sampled * window)
            pairs += count * min(load.prompt_pairs, load.num_prompt_tokens * window)
    return context, pairs


def _message(device: DeviceSpec, num_bytes: float) -> float:
    link = device.links[0]
    return link.latency_us * 1e-6 + num_bytes / link.bandwidth


def _with_host(device: DeviceSpec, load: StepLoad, data: int, spent: StepTime) -> StepTime:
    """The host prepares the next step while the device runs: only what it takes longer shows."""
    host = (device.host_us + device.host_request_us * load.num_sampled * data) * 1e-6
    return spent + StepTime(host=max(0.0, host - spent.total))
