"""Ragged paged attention in plain XLA: the specification of every faster version.

Knows one layer's queries and the block table. Refuses to know requests, models, or where the cache came from.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.kernels.e4m3.reference import widen

QUERY_TILE = 16
KEY_TILE = 256


def plan_attention(
    kv_cache: Float[Array, "L P 2 K C H"],
    query_start: Int[Array, " B+1"],
    context_len: Int[Array, " B"],
    *,
    num_tokens: int,
    table_width: int,
    group: int,
    dtype: jnp.dtype,
    window: int | None = None,
    has_sinks: bool = False,
) -> Any:
    """What all layers with this window can share of `paged_attention`: made once, handed to each. Here it is nothing.

    Of the cache only the shape and the type count. The queries are [num_tokens, group * K, H] of `dtype`, the block
    table has table_width columns. A plan is an opaque tree of arrays, whose shapes do not depend on the window.
    """
    return ()


def paged_attention(
    query: Float[Array, "T N H"],
    kv_cache: Float[Array, "L P 2 K C H"],
    layer: int | Int[Array, ""],
    block_table: Int[Array, "B M"],
    query_start: Int[Array, " B+1"],
    context_len: Int[Array, " B"],
    *,
    scale: float,
    window: int | Int[Array, ""] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    plan: Any = None,
) -> Float[Array, "T N H"]:
    """Causal attention of each request's new tokens over its own context.

    Request b owns the flat tokens query_start[b]:query_start[b+1]; they are the last ones of its context_len[b] tokens,
    whose keys and values are in the cache already. A window of w lets query i see the keys j with i - w < j <= i.
    What is cached is cast to the query's type; bytes are e4m3 numbers.
    A sink is a logit of its query head that joins the softmax as if it were that of one more key, whose value is zero
    (Xiao et al., 2023, arXiv:2309.17453; learned, as in gpt-oss). It is neither scaled nor capped, and every query sees
    it; minus infinity is none.
    The plan is that of `plan_attention` for these arguments; without one, a version that needs it makes it.
    With one token per request (T == B) the batch is a decode batch: query_start must then be 0, 1, ..., B.
    Rows of padding tokens hold finite rubbish.

    The queries are cut into tiles of one request each; all tiles walk over the key tiles together with an online
    softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867), as far as the longest context in the batch reaches.
    """
    T, N, H = query.shape
    K, C = kv_cache.shape[3:5]
    B, M = block_table.shape
    tile = 1 if T == B else QUERY_TILE
    request_Q, index_QS, valid_QS = _query_tiles(query_start, T, tile)
    num_new_Q = (query_start[1:] - query_start[:-1])[request_Q]
    position_QS = index_QS - query_start[request_Q][:, None] + (context_len[request_Q] - num_new_Q)[:, None]

    blocks_per_tile = max(1, KEY_TILE // C)
    table_BM = jnp.pad(block_table, ((0, 0), (0, -M % blocks_per_tile)))
    q_QSKGH = query[jnp.minimum(index_QS, T - 1)].reshape(-1, tile, K, N // K, H)

    def attend_key_tile(j, carry):
        best_QKGS, total_QKGS, out_QKGSH = carry
        blocks_Bt = jax.lax.dynamic_slice_in_dim(table_BM, j * blocks_per_tile, blocks_per_tile, axis=1)
        pages = widen(kv_cache[layer, blocks_Bt[request_Q]], query.dtype)
        k_QKXH, v_QKXH = (
            pages[:, :, i].swapaxes(1, 2).reshape(pages.shape[0], K, blocks_per_tile * C, H) for i in (0, 1)
        )
        logits = jnp.einsum("QSKGH,QKXH->QKGSX", q_QSKGH, k_QKXH, preferred_element_type=jnp.float32) * scale
        if softcap is not None:
            logits = jnp.tanh(logits / softcap) * softcap
        key_X = j * blocks_per_tile * C + jnp.arange(blocks_per_tile * C, dtype=jnp.int32)
        seen_QSX = key_X <= position_QS[..., None]
        if window is not None:
            seen_QSX &= key_X > position_QS[..., None] - window
        seen = (seen_QSX & valid_QS[..., None])[:, None, None]
        new_best = jnp.maximum(best_QKGS, jnp.where(seen, logits, -jnp.inf).max(-1))
        anchor = jnp.where(jnp.isneginf(new_best), 0.0, new_best)
        weight = jnp.where(seen, jnp.exp(logits - anchor[..., None]), 0.0)
        shrink = jnp.exp(best_QKGS - anchor)
        part = jnp.einsum("QKGSX,QKXH->QKGSH", weight.astype(v_QKXH.dtype), v_QKXH, preferred_element_type=jnp.float32)
        return new_best, total_QKGS * shrink + weight.sum(-1), out_QKGSH * shrink[..., None] + part

    shape = (q_QSKGH.shape[0], K, N // K, tile)
    sink_KG11 = (jnp.full(N, -jnp.inf) if sinks is None else sinks.astype(jnp.float32)).reshape(K, N // K, 1)
    best_QKGS = jnp.broadcast_to(sink_KG11, shape).astype(jnp.float32)
    start = (best_QKGS, jnp.where(jnp.isneginf(best_QKGS), 0.0, 1.0), jnp.zeros((*shape, H), jnp.float32))
    keys_per_tile = blocks_per_tile * C
    first = jnp.int32(0)
    if window is not None:
        beyond = jnp.iinfo(jnp.int32).max
        # Padding rows of a decode batch are at position -1: they must not make the walk begin at 0.
        oldest = jnp.min(jnp.where(valid_QS & (position_QS >= 0), position_QS, beyond), initial=beyond)
        first = jnp.maximum(oldest - window + 1, 0) // keys_per_tile
    last = (jnp.max(context_len, initial=0) + keys_per_tile - 1) // keys_per_tile
    _, total_QKGS, out_QKGSH = jax.lax.fori_loop(first, last.astype(first.dtype), attend_key_tile, start)
    out_QKGSH = out_QKGSH / jnp.where(total_QKGS == 0.0, 1.0, total_QKGS)[..., None]
    out_QSNH = out_QKGSH.transpose(0, 3, 1, 2, 4).reshape(-1, tile, N, H)
    return _from_tiles(out_QSNH, query_start, T, tile).astype(query.dtype)


def _query_tiles(query_start, num_tokens: int, tile: int):
    """Cuts the flat tokens into tiles of one request each: request [Q], token index [Q S], is it a token [Q S]."""
    num_requests = query_start.shape[0] - 1
    if tile == 1:
        request = jnp.arange(num_requests, dtype=jnp.int32)
        index = request[:, None]
        return request, index, jnp.ones_like(index, bool)
    ends = jnp.cumsum(_tiles_per_request(query_start, tile))
    tiles = jnp.arange(num_tokens // tile + num_requests, dtype=jnp.int32)
    request = jnp.minimum(jnp.searchsorted(ends, tiles, side="right"), num_requests - 1)
    first_tile = ends[request] - _tiles_per_request(query_start, tile)[request]
    index = (query_start[request] + (tiles - first_tile) * tile)[:, None] + jnp.arange(tile, dtype=jnp.int32)
    return request, index, index < query_start[request + 1][:, None]


def _from_tiles(out_QSNH, query_start, num_tokens: int, tile: int):
    if tile == 1:
        return out_QSNH[:, 0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    request = jnp.clip(jnp.searchsorted(query_start, token, side="right") - 1, 0, query_start.shape[0] - 2)
    counts = _tiles_per_request(query_start, tile)
    offset = token - query_start[request]
    tile_index = (jnp.cumsum(counts) - counts)[request] + offset // tile
    return out_QSNH[jnp.minimum(tile_index, out_QSNH.shape[0] - 1), offset % tile]


def _tiles_per_request(query_start, tile: int):
    return -(-(query_start[1:] - query_start[:-1]) // tile)
