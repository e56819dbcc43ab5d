"""Checkpoint -> weights on the device, tensor by tensor. Knows pieces and shardings; no file format, no model code.

Every parameter is allocated on the device once; chunks of each tensor are read from the memory map, placed by a donated
update, and dropped. So a load needs the weights plus a few chunks, never a second copy.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from tqdm import tqdm

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.source import Checkpoint
from jaxllm.models.family import Piece
from jaxllm.models.forward import DecoderProgram, ParamSpec, Weights, weights_tree

CHUNK_BYTES = 64 << 20
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "self_attn.attn.bias", "masked_bias")
Shardings = Callable[[ParamSpec], Sharding]


def load_weights(
    program: DecoderProgram,
    checkpoint: Checkpoint,
    pieces: Mapping[str, tuple[Piece, ...]],
    dtype: jnp.dtype,
    shardings: Shardings,
    progress: bool = True,
) -> Weights:
    """Reads all parameters of the program.

    Raises:
        InputError: a tensor is missing, is not expected, or has another shape than the configuration says.
    """
    check_tensors(checkpoint, pieces, program.cfg.num_layers, program.cfg.tie_embeddings)
    total = sum(int(np.prod(spec.stored_shape)) for spec in program.params)
    values = {}
    with tqdm(total=total, unit=" weights", unit_scale=True, desc="loading", disable=None if progress else True) as bar:
        for spec in program.params:
            array = _zeros(spec, dtype, shardings(spec))
            for piece in pieces[spec.name]:
                for layer in spec.layers:
                    array = _place_tensor(array, checkpoint, piece, layer, spec.num_layers is not None, bar.update)
            values[spec.path] = array
    return jax.block_until_ready(weights_tree(values))


def dummy_weights(program: DecoderProgram, dtype: jnp.dtype, shardings: Shardings, seed: int = 0) -> Weights:
    """Random weights in the real shapes, made on the device by one program; norms scale by one."""
    salts = np.arange(len(program.params), dtype=np.uint32) + np.uint32(seed % 2**32)
    scale = np.float32(1.0 - program.cfg.norm_offset)

    def fill(salts, norm_scale):
        # The scale is an argument: a small result that XLA knew would be its constant, at an address of its choosing.
        return [
            jnp.full(spec.stored_shape, norm_scale, dtype)
            if spec.role == "norm"
            else _random(spec.stored_shape, dtype, salts[i])
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


def _place_tensor(
    array: jax.Array, checkpoint: Checkpoint, piece: Piece, layer: int, stacked: bool, advance: Callable[[int], Any]
) -> jax.Array:
    """Fills one tensor's place in a parameter, chunk by chunk."""
    name, rows, place = piece.name.format(l=layer), piece.num_rows, layer if stacked else 0
    row_shape, first = piece.shape[1:], piece.first_row
    if not piece.linear:
        for start, stop in _chunks(rows, 1, 1, row_shape, checkpoint.dtype(name)):
            chunk = checkpoint.read(name, first + start, first + stop)
            array = jax.block_until_ready(_set_rows(array, chunk, place, start, stacked))
            advance(chunk.size)
        return array
    run = rows // piece.units
    for start, stop in _chunks(rows, run, array.shape[-1], row_shape, checkpoint.dtype(name)):
        chunk = checkpoint.read(name, first + start, first + stop)
        chunk = chunk.reshape(-1, min(run, stop - start), *(row_shape or (1,)))  # a bias is a table of one column
        column = piece.column + start % run
        array = jax.block_until_ready(_set_columns(array, chunk, place, start // run, column, piece.units, stacked))
        advance(chunk.size)
    return array


def _chunks(rows: int, run: int, line: int, row_shape: tuple[int, ...], dtype: np.dtype) -> list[tuple[int, int]]:
    """Ranges of rows of at most CHUNK_BYTES: whole runs if one fits, else whole lines of a run, else part of a line.

    A line is what the last axis of the parameter holds.
    """
    row_bytes = int(np.prod(row_shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    fitting = max(1, CHUNK_BYTES // row_bytes)
    inner, outer = (run, rows) if fitting >= run else (line, run) if fitting >= line else (1, line)
    step = fitting // inner * inner
    return [
        (first + start, first + min(start + step, outer))
        for first in range(0, rows, outer)
        for start in range(0, outer, step)
    ]


@functools.partial(jax.jit, donate_argnums=0, static_argnames="stacked")
def _set_rows(array, chunk, layer, start, stacked):
    table = array if stacked else array[None]
    table = jax.lax.dynamic_update_slice(
        table, chunk[None].astype(array.dtype), (layer, start) + (0,) * (chunk.ndim - 1)
    )
    return table.reshape(array.shape)


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("units", "stacked"))
def _set_columns(array, chunk, layer, unit, column, units, stacked):
    # The last axis is kept apart: merged with the one before it, its sharding would be lost in silence.
    layers, line = array.shape[0] if stacked else 1, array.shape[-1]
    num_units, run, num_in = chunk.shape
    table = array.reshape(layers, num_in, units, -1, line)
    chunk = chunk.astype(array.dtype).transpose(2, 0, 1)
    chunk = chunk.reshape(1, num_in, num_units, max(1, run // line), min(run, line))
    place = (layer, 0, unit, column // line, column % line)
    return jax.lax.dynamic_update_slice(table, chunk, place).reshape(array.shape)


def _zeros(spec: ParamSpec, dtype: jnp.dtype, sharding: Sharding) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(spec.stored_shape, dtype), out_shardings=sharding)()


def _random(shape: tuple[int, ...], dtype: jnp.dtype, salt: jax.Array) -> jax.Array:
    """Uniform numbers, each a hash of its place (MurmurHash3's mixer): jax's own generators compile for seconds."""
    bits = salt
    for axis in range(len(shape)):
        bits = (bits ^ jax.lax.broadcasted_iota(jnp.uint32, shape, axis)) * np.uint32(0x9E3779B1)
        bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
        bits = bits ^ (bits >> 16)
    return ((bits >> 8).astype(jnp.float32) * (0.06 / 2**24) - 0.03).astype(dtype)
