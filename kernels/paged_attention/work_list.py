"""Cuts a ragged batch into pieces of work for a kernel's programs, on the device. Knows lengths only; no keys.

A list is an int32 table of a compiled size with one piece per row, the long ones first, so that the short ones fill the
card's last gaps; rows behind the last piece have request -1. Nothing here sorts: the place of a piece is the number of
pieces before it, one reduction over a comparison of each with each.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class ChunkList(NamedTuple):
    """Chunks of the contexts of requests with few new tokens. W is the capacity.

    chunk: request (-1: none), first key, end, and whether the request has other chunks too.
    A request's chunks are the rows first_chunk : first_chunk + num_chunks. num_arrived: zeros for a kernel to count in,
    a number for each request and KV head, which it leaves as it found them.
    """

    chunk: Int[Array, "W 4"]
    first_chunk: Int[Array, " B"]
    num_chunks: Int[Array, " B"]
    num_arrived: Int[Array, "B K"]


class TileList(NamedTuple):
    """Tiles of the tokens of requests with many new ones, and how many there are. W is the capacity.

    tile: request (-1: none), first token, tokens, position.
    """

    tile: Int[Array, "W 4"]
    num_tiles: Int[Array, "1"]


def list_chunks(
    query_start: Int[Array, " B+1"],
    context_len: Int[Array, " B"],
    window: int | Int[Array, ""] | None,
    *,
    max_new: int,
    all_rows: bool,
    unit: int,
    min_chunk: int,
    num_extra: int,
    num_kv_heads: int = 1,
) -> ChunkList:
    """Splits the contexts of the requests that bring 1 to max_new tokens into chunks of about the same length.

    At most B + num_extra chunks come of it. They begin at multiples of `unit` keys and are at least min_chunk long
    where the context is. With `all_rows` (a decode batch), rows without a context get one empty chunk, so that somebody
    writes them.
    """
    B = context_len.shape[0]
    new_B = query_start[1:] - query_start[:-1]
    taken_B = jnp.full(B, True) if all_rows else (new_B >= 1) & (new_B <= max_new)
    start_B = jnp.zeros_like(context_len)
    if window is not None:
        oldest_B = jnp.maximum(context_len - new_B + 1 - jnp.asarray(window, jnp.int32), 0)
        start_B = jnp.minimum(oldest_B, context_len) // unit * unit
    span_B = jnp.where(taken_B, context_len - start_B, 0)
    units_B = _ceil(span_B, unit)
    count_B = jnp.ones_like(units_B)
    if num_extra:
        chunk = jnp.maximum(_ceil(_ceil(span_B.sum(), num_extra), unit), max(1, min_chunk // unit))
        count_B = jnp.maximum(_ceil(units_B, chunk), 1)
    length_B = _ceil(units_B, count_B)  # in units, the same for all chunks of a request but the last
    count_B = jnp.where(taken_B, jnp.maximum(_ceil(units_B, jnp.maximum(length_B, 1)), 1), 0)
    first_B = _places(jnp.where(taken_B, length_B, -1), count_B)
    row_W = jnp.arange(B + num_extra, dtype=jnp.int32)[:, None]
    is_WB = (row_W >= first_B) & (row_W < first_B + count_B)
    begin_WB = start_B + (row_W - first_B) * length_B * unit
    end_WB = jnp.minimum(begin_WB + length_B * unit, start_B + span_B)
    request_B = jnp.arange(B, dtype=jnp.int32)
    fields = (request_B + 1, begin_WB, end_WB, (count_B > 1).astype(jnp.int32))
    chunk_W4 = jnp.stack([jnp.where(is_WB, field, 0).sum(1) for field in fields], axis=1).astype(jnp.int32)
    # No plain zeros: XLA would make those anew in each layer of a scan, which is one more kernel.
    arrived_BK = jnp.broadcast_to(jnp.minimum(context_len, 0)[:, None], (B, num_kv_heads))
    return ChunkList(chunk_W4 - jnp.array([1, 0, 0, 0], jnp.int32), first_B, count_B, arrived_BK)


def list_tiles(
    query_start: Int[Array, " B+1"],
    context_len: Int[Array, " B"],
    window: int | Int[Array, ""] | None,
    num_tokens: int,
    *,
    min_new: int,
    tile: int,
    align: int = 1,
) -> TileList:
    """Cuts the tokens of requests that bring at least min_new into tiles.

    A request's tiles but the first begin at multiples of `align` among all tokens; its first spans a multiple less.

    The position is that of the first token in its request. The padding tokens behind the last request are cut likewise;
    their position is such that they see no key: they have to be written, with anything finite.
    """
    B = context_len.shape[0]
    start_R = jnp.concatenate([query_start, jnp.full(1, num_tokens, query_start.dtype)])
    new_R = start_R[1:] - start_R[:-1]
    position_R = jnp.concatenate([context_len, jnp.full(1, -num_tokens, context_len.dtype)]) - new_R
    padding_R = jnp.arange(B + 1) == B
    before_R = start_R[:-1] % align
    taken_R = ((new_R >= min_new) | padding_R) & (new_R > 0)
    count_R = jnp.where(taken_R, _ceil(before_R + new_R, tile), 0)
    end_R = jnp.cumsum(count_R)
    row_W = jnp.arange((num_tokens + (align - 1) * (B + 1)) // tile + B + 1, dtype=jnp.int32)
    request_W = jnp.minimum((row_W[:, None] >= end_R).sum(1).astype(jnp.int32), B)
    aligned_W = (row_W - (end_R - count_R)[request_W]) * tile - before_R[request_W]
    offset_W = jnp.maximum(aligned_W, 0)
    left_W = jnp.clip(jnp.minimum(new_R[request_W], aligned_W + tile) - offset_W, 0, tile)
    position_W = position_R[request_W] + offset_W
    used_W = row_W < end_R[-1]
    keys_W = jnp.maximum(position_W + left_W, 0)
    if window is not None:
        keys_W = jnp.minimum(keys_W, jnp.asarray(window, jnp.int32) + tile)
    place_W = _places(jnp.where(used_W, keys_W, -1), jnp.ones_like(row_W))
    # The padding's tiles see nothing, so the table they name does not matter; it must exist.
    table_row_W = jnp.where(used_W, jnp.minimum(request_W, B - 1), -1)
    tile_W4 = jnp.stack([table_row_W, start_R[request_W] + offset_W, left_W, position_W], axis=1).astype(jnp.int32)
    tile_W4 = jnp.zeros_like(tile_W4).at[place_W].set(tile_W4, unique_indices=True, mode="promise_in_bounds")
    return TileList(tile_W4, end_R[-1:].astype(jnp.int32))


def _places(length: Int[Array, " R"], count: Int[Array, " R"]) -> Int[Array, " R"]:
    """Where each entry's `count` rows begin if the longest come first, equals in the order they have."""
    index = jnp.arange(length.shape[0])
    before = (length > length[:, None]) | ((length == length[:, None]) & (index < index[:, None]))
    return jnp.where(before, count, 0).sum(1).astype(jnp.int32)


def _ceil(a: jax.Array, b: int | jax.Array) -> jax.Array:
    return -(-a // b)
