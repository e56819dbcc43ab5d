"""Checkpoint -> weights on the devices, tensor by tensor. Knows pieces and shardings; no file format, no model code.

Each shard is allocated once on each device that holds it. What it needs of each tensor (models/placement.py) is read
from the memory map a chunk at a time, once for all these devices, placed by a donated update, and dropped. So a load
needs the weights plus a few chunks, never a second copy, and reads nothing that belongs to other processes' devices.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxlib._jax import Device
from tqdm import tqdm

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.source import Checkpoint
from jaxllm.models.config import ModelConfig
from jaxllm.models.device_tables import DeviceTables
from jaxllm.models.family import Piece
from jaxllm.models.forward import DecoderProgram, ParamSpec, Weights, weights_tree
from jaxllm.models.placement import Index, Run, ShardPlan, axis_numbers, plan_shard

CHUNK_BYTES = 64 << 20
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "self_attn.attn.bias", "masked_bias")
Shardings = Callable[[ParamSpec], Sharding]
Advance = Callable[[int], Any]


def load_weights(
    program: DecoderProgram,
    checkpoint: Checkpoint,
    pieces: Mapping[str, tuple[Piece, ...]],
    dtype: jnp.dtype,
    shardings: Shardings,
    progress: bool = True,
) -> Weights:
    """Reads all parameters of the program; the pieces are those of the configuration before it was split.

    Raises:
        InputError: a tensor is missing, is not expected, or has another shape than the configuration says.
    """
    cfg = program.cfg
    check_tensors(checkpoint, pieces, cfg.num_layers, cfg.tie_embeddings)
    by_device = {spec.path: _shards(spec, shardings(spec)) for spec in program.params}
    plans: dict[tuple[str, Index], ShardPlan] = {}
    for spec in program.params:
        for index in by_device[spec.path].values():
            if (spec.name, index) not in plans:
                plans[spec.name, index] = plan_shard(pieces[spec.name], spec.shape, spec.axes, index, cfg)
    total = sum(
        len(spec.layers) * plans[spec.name, index].size
        for spec in program.params
        for index in set(by_device[spec.path].values())
    )
    values = {}
    with tqdm(total=total, unit=" weights", unit_scale=True, desc="loading", disable=None if progress else True) as bar:
        for spec in program.params:
            own = {device: plans[spec.name, index] for device, index in by_device[spec.path].items()}
            values[spec.path] = _load(spec, checkpoint, own, dtype, shardings(spec), bar.update)
    return jax.block_until_ready(weights_tree(values))


def _shards(spec: ParamSpec, sharding: Sharding) -> dict[Device, Index]:
    """Where, in one layer, the shard of each of this process's devices lies."""
    found = {}
    for device, index in sharding.addressable_devices_indices_map(spec.stored_shape).items():
        bounds = [part.indices(size)[:2] for part, size in zip(index or (), spec.stored_shape, strict=True)]
        found[device] = tuple(bounds if spec.num_layers is None else bounds[1:])
    return found


def _load(
    spec: ParamSpec,
    checkpoint: Checkpoint,
    plans: dict[Device, ShardPlan],
    dtype: jnp.dtype,
    sharding: Sharding,
    advance: Advance,
) -> jax.Array:
    """Fills one parameter."""
    stacked, devices = spec.num_layers is not None, list(plans)
    shape = sharding.shard_shape(spec.stored_shape)
    tables = DeviceTables(shape, dtype, devices, stacked, plans[devices[0]].num_inputs)
    shards = list(dict.fromkeys(plans.values()))
    for layer in spec.layers:
        stored = _stored_dtype(checkpoint, shards, layer)
        for first, end in _chunks(shards[0], stored):
            chunks = {plan: _read(checkpoint, plan, layer, Run(first, end, 0), stored, advance) for plan in shards}
            tables.place([chunks[plans[device]] for device in devices], layer if stacked else 0, first)
    return tables.finish(spec.stored_shape, sharding)


def _stored_dtype(checkpoint: Checkpoint, shards: list[ShardPlan], layer: int) -> np.dtype:
    """The type in which a layer's chunks are handed over: its tensors' own, or one that holds all of them."""
    names = {copy.piece.name.format(l=layer) for plan in shards for copy in plan.copies}
    dtypes = {checkpoint.dtype(name) for name in names}
    return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)


def _chunks(plan: ShardPlan, dtype: np.dtype) -> list[tuple[int, int]]:
    """Ranges of lanes of at most CHUNK_BYTES, which end where a copy does if one does within them."""
    fitting = max(1, CHUNK_BYTES // (plan.num_columns * dtype.itemsize))
    edges, found, first = plan.edges(), [], 0
    while first < plan.num_lanes:
        within = [edge for edge in edges if first < edge <= first + fitting]
        found.append((first, within[-1] if within else first + fitting))
        first = found[-1][1]
    return found


def _read(
    checkpoint: Checkpoint, plan: ShardPlan, layer: int, lanes: Run, dtype: np.dtype, advance: Advance
) -> np.ndarray:
    """Reads a chunk [lanes, columns] of a shard: as it lies in the checkpoint, or put together of several parts."""
    table = None
    for copy in plan.copies:
        run, piece = copy.run, copy.piece
        first, end = max(run.place, lanes.start), min(run.end, lanes.stop)
        if first >= end:
            continue
        start, stop = run.start + first - run.place, run.start + end - run.place
        for columns in plan.columns:
            part = _read_part(checkpoint, piece, layer, (start, stop), (columns.start, columns.stop))
            advance(part.size)
            if part.shape == (lanes.stop - lanes.start, plan.num_columns) and part.dtype == dtype:
                return part
            if table is None:
                table = np.zeros((lanes.stop - lanes.start, plan.num_columns), dtype)
            table[first - lanes.start : end - lanes.start, columns.place : columns.end] = part
    return np.zeros((lanes.stop - lanes.start, plan.num_columns), dtype) if table is None else table


def _read_part(
    checkpoint: Checkpoint, piece: Piece, layer: int, rows: tuple[int, int], columns: tuple[int, int]
) -> np.ndarray:
    """Some rows, and some columns of them; a bias or a scale is a table of one column."""
    name = piece.name.format(l=layer)
    if columns == (0, math.prod(piece.shape[1:])):
        return checkpoint.read(name, *rows).reshape(rows[1] - rows[0], -1)
    return checkpoint.read(name, *rows, columns)


def dummy_weights(program: DecoderProgram, dtype: jnp.dtype, shardings: Shardings, seed: int = 0) -> Weights:
    """Random weights in the real shapes, made on the devices by one program; norms scale by one.

    They are the same however the heads are laid out: repeated heads are equal, empty places are zeros.
    """
    salts = np.arange(len(program.params), dtype=np.uint32) + np.uint32(seed % 2**32)
    scale = np.float32(1.0 - program.cfg.norm_offset)

    def fill(salts, norm_scale):
        # The scale is an argument: a small result that XLA knew would be its constant, at an address of its choosing.
        return [
            jnp.full(spec.stored_shape, norm_scale, dtype)
            if spec.role == "norm"
            else _random(spec, program.cfg, dtype, salts[i])
            for i, spec in enumerate(program.params)
        ]

    arrays = jax.jit(fill, out_shardings=[shardings(spec) for spec in program.params])(salts, scale)
    paths = [spec.path for spec in program.params]
    return jax.block_until_ready(weights_tree(dict(zip(paths, arrays, strict=True))))


def check_tensors(
    checkpoint: Checkpoint, pieces: Mapping[str, tuple[Piece, ...]], num_layers: int, tied: bool = False
) -> None:
    """Compares names and shapes before anything is placed."""
    expected: dict[str, tuple[int, ...]] = {}
    for parameter, group in pieces.items():
        for piece in group:
            for layer in range(num_layers if parameter.startswith("layers.") else 1):
                expected[piece.name.format(l=layer)] = piece.shape
    names = set(checkpoint.names())
    missing = [f"{name} {shape}" for name, shape in expected.items() if name not in names]
    if missing:
        raise InputError(f"{checkpoint.path}: {len(missing)} missing tensor(s): {_some(missing)}")
    wrong = [
        f"{name} is {checkpoint.shape(name)}, the configuration says {shape}"
        for name, shape in expected.items()
        if tuple(checkpoint.shape(name)) != shape
    ]
    if wrong:
        raise InputError(f"{checkpoint.path}: {len(wrong)} mis-shaped tensor(s): {_some(wrong)}")
    spare = ("lm_head.weight",) if tied else ()  # some checkpoints repeat the embedding there
    extra = [n for n in sorted(names - set(expected)) if not n.endswith(_IGNORED_SUFFIXES) and n not in spare]
    if extra:
        raise InputError(
            f"{checkpoint.path}: {len(extra)} tensor(s) that the configuration does not use: "
            + _some([f"{name} {tuple(checkpoint.shape(name))}" for name in extra])
        )


def _some(items: list[str]) -> str:
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if len(items) > 4 else "")


def _random(spec: ParamSpec, cfg: ModelConfig, dtype: jnp.dtype, salt: jax.Array) -> jax.Array:
    """Uniform numbers, each a hash of its place in the unsplit parameter (MurmurHash3's mixer).

    jax's own generators compile for seconds.
    """
    shape, bits = spec.stored_shape, salt
    by_axis, filled = axis_numbers(spec.stored_axes, shape, cfg)
    for axis, own in enumerate(by_axis):
        in_order = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        bits = (bits ^ (in_order if own is None else own.astype(np.uint32))) * np.uint32(0x9E3779B1)
        bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
        bits = bits ^ (bits >> 16)
    found = ((bits >> 8).astype(jnp.float32) * (0.06 / 2**24) - 0.03).astype(dtype)
    return found if filled.all() else jnp.where(filled, found, jnp.zeros((), dtype))
