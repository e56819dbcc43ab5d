"""Choosing a token per row in Triton: one pass over the logits, then a program per row that reads little more.

Knows arrays and launches. The kernels: `scan_logits` over all chunks, `draw_tokens`, and `score_tokens` where there are
scores to tell.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
from jaxtyping import Array, Float, Int, UInt32

from jaxllm.kernels.launch import launch
from jaxllm.kernels.sampling.reference import Edits, Filters, Penalties, TokenScores, least_scaled, process
from jaxllm.kernels.sampling.triton_draw import draw_tokens
from jaxllm.kernels.sampling.triton_logits import DRAWS_FROM_ALL, DRAWS_FROM_LIST, DRAWS_FROM_NUCLEUS, G
from jaxllm.kernels.sampling.triton_scan import scan_logits
from jaxllm.kernels.sampling.triton_score import score_tokens

_DRAW_REGISTERS = 128  # two programs of eight warps fit on a multiprocessor
_MOST_EDITS = 512  # beyond that a program would look through them for longer than XLA takes for a copy of the logits


@dataclass(frozen=True, slots=True)
class SampleConfig:
    """Constants of the kernels: tokens of a chunk of the scan and of a tile of the other two, and their warps."""

    chunk: int = 1024
    scan_warps: int = 4
    draw_tile: int = 1024
    draw_warps: int = 8
    score_tile: int = 2048
    score_warps: int = 8


class _Scan(NamedTuple):
    """What the scan leaves, per chunk of a row ([B, S]) and per group of G tokens ([B, N])."""

    bound: jax.Array
    max: jax.Array
    total: jax.Array
    key: jax.Array
    raw_max: jax.Array
    raw_total: jax.Array
    raw_key: jax.Array


def choose(
    raw: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    seed: UInt32[Array, "B 2"],
    position: Int[Array, " B"],
    *,
    logits: Float[Array, "B V"] | None = None,
    mask: UInt32[Array, "B W"] | None = None,
    edits: Edits | None = None,
    penalties: Penalties | None = None,
    filters: Filters | None = None,
    num_best: int | None = None,
    as_logprobs: bool = True,
) -> tuple[Int[Array, " B"], TokenScores | None]:
    """Draws a token of each row, and scores it by the raw logits unless num_best is None."""
    return choose_with(
        SampleConfig(), raw, temperature, seed, position, logits, mask, edits, penalties, filters, num_best, as_logprobs
    )


def choose_with(
    config: SampleConfig,
    raw: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    seed: UInt32[Array, "B 2"],
    position: Int[Array, " B"],
    logits: Float[Array, "B V"] | None,
    mask: UInt32[Array, "B W"] | None,
    edits: Edits | None,
    penalties: Penalties | None,
    filters: Filters | None,
    num_best: int | None,
    as_logprobs: bool,
) -> tuple[Int[Array, " B"], TokenScores | None]:
    """The same with constants of one's own."""
    raw = raw.astype(jnp.float32)
    V = raw.shape[1]
    if edits is not None and edits.request.shape[0] > _MOST_EDITS:
        logits = process(raw if logits is None else logits, temperature, mask, edits)
        mask = edits = None
    is_loaded_raw = logits is None
    is_raw = is_loaded_raw and mask is None and edits is None and penalties is None
    logits = raw if logits is None else logits.astype(jnp.float32)
    nothing = jnp.zeros((1,), jnp.int32)
    edits = edits or Edits(nothing[:0], nothing, nothing)
    rules = (
        logits,
        nothing if mask is None else mask,
        edits.request if edits.request.size else nothing,
        edits.token,
        edits.value,
        *(penalties or Penalties(*(nothing,) * 5)),
        temperature,
        seed,
        position,
    )
    constants = {
        "V": V,
        "W": 1 if mask is None else mask.shape[1],
        "E": edits.request.shape[0],
        "E_PADDED": triton.next_power_of_2(max(1, edits.request.shape[0])),
        "HAS_MASK": mask is not None,
        "HAS_PENALTIES": penalties is not None,
    }
    mode = nothing
    if filters is not None:
        has_list = ((filters.top_k > 0) & (filters.top_k < V)) | (filters.min_p > 0.0)
        mode = jnp.where(filters.top_p < 1.0, DRAWS_FROM_NUCLEUS.value, DRAWS_FROM_ALL.value)
        mode = jnp.where(has_list, DRAWS_FROM_LIST.value, mode)
        mode = jnp.where(temperature == 0.0, DRAWS_FROM_ALL.value, mode).astype(jnp.int32)
    scan = _scan(config, raw, rules, mode, constants, filters is not None, num_best is not None, is_loaded_raw, is_raw)
    token = _draw(config, rules, mode, filters, scan, constants)
    if num_best is None:
        return token, None
    return token, _score(config, raw, token, scan, num_best, as_logprobs)


def _scan(
    config: SampleConfig,
    raw: jax.Array,
    rules: tuple[jax.Array, ...],
    mode: jax.Array,
    constants: dict[str, int],
    has_filters: bool,
    has_scores: bool,
    is_loaded_raw: bool,
    is_raw: bool,
) -> _Scan:
    B, V = raw.shape
    chunk = _chunk(config, V)
    num_chunks, num_groups = triton.cdiv(V, chunk), triton.cdiv(V, G)

    def result(dtype: type, width: int, is_used: bool = True) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((B, width) if is_used else (1,), dtype)

    results = (
        result(jnp.float32, num_chunks),
        result(jnp.float32, num_chunks, has_filters),
        result(jnp.float32, num_chunks, has_filters),
        result(jnp.int32, num_groups, has_filters and not (is_raw and has_scores)),
        result(jnp.float32, num_chunks, has_scores),
        result(jnp.float32, num_chunks, has_scores),
        result(jnp.int32, num_groups, has_scores),
    )
    scan = _Scan(
        *launch(
            scan_logits,
            raw,
            *rules,
            mode,
            results=results,
            grid=B * num_chunks,
            num_warps=config.scan_warps,
            **constants,
            G=G,
            NUM_GROUPS=num_groups,
            NUM_CHUNKS=num_chunks,
            CHUNK_GROUPS=chunk // G,
            HAS_FILTERS=has_filters,
            HAS_SCORES=has_scores,
            IS_LOADED_RAW=is_loaded_raw,
            IS_RAW=is_raw,
        )
    )
    return scan._replace(key=scan.raw_key) if is_raw and has_scores else scan


def _draw(
    config: SampleConfig,
    rules: tuple[jax.Array, ...],
    mode: jax.Array,
    filters: Filters | None,
    scan: _Scan,
    constants: dict[str, int],
) -> jax.Array:
    V, temperature = constants["V"], rules[-3]
    B, num_chunks = scan.bound.shape
    chunk, num_groups = _chunk(config, V), triton.cdiv(V, G)
    limits = (jnp.zeros((1,), jnp.int32), *(jnp.zeros((1,), jnp.float32),) * 2)
    if filters is not None:
        top_k = jnp.where(filters.top_k >= V, 0, jnp.maximum(filters.top_k, 0))
        limits = (top_k, filters.top_p, least_scaled(temperature, filters.min_p))
    token, _, _ = launch(
        draw_tokens,
        *rules,
        mode,
        *limits,
        scan.bound,
        scan.max,
        scan.total,
        scan.key,
        results=(
            jax.ShapeDtypeStruct((B,), jnp.int32),
            jax.ShapeDtypeStruct((1,) if filters is None else (B, num_groups), jnp.int32),
            jax.ShapeDtypeStruct((1,) if filters is None else (B, config.draw_tile), jnp.int32),
        ),
        grid=B,
        num_warps=config.draw_warps,
        max_registers=_DRAW_REGISTERS,
        **constants,
        G=G,
        NUM_GROUPS=num_groups,
        GROUPS_PADDED=triton.next_power_of_2(num_groups),
        NUM_CHUNKS=num_chunks,
        CHUNKS_PADDED=triton.next_power_of_2(num_chunks),
        CHUNK=chunk,
        TILE=config.draw_tile,
        HAS_FILTERS=filters is not None,
    )
    return token


def _chunk(config: SampleConfig, V: int) -> int:
    return min(config.chunk, triton.next_power_of_2(max(V, G)))


def _score(
    config: SampleConfig,
    raw: jax.Array,
    token: jax.Array,
    scan: _Scan,
    num_best: int,
    as_logprobs: bool,
) -> TokenScores:
    B, V = raw.shape
    num_groups, num_chunks = scan.raw_key.shape[1], scan.raw_max.shape[1]
    number, integer = jax.ShapeDtypeStruct((B,), jnp.float32), jax.ShapeDtypeStruct((B,), jnp.int32)
    width = max(num_best, 1)
    chosen, rank, best, best_token, highest, log_total, _ = launch(
        score_tokens,
        raw,
        token,
        scan.raw_max,
        scan.raw_total,
        scan.raw_key,
        results=(
            number,
            integer,
            jax.ShapeDtypeStruct((B, width), jnp.float32),
            jax.ShapeDtypeStruct((B, width), jnp.int32),
            number,
            number,
            jax.ShapeDtypeStruct((B, num_groups), jnp.int32),
        ),
        grid=B,
        num_warps=config.score_warps,
        V=V,
        G=G,
        NUM_GROUPS=num_groups,
        GROUPS_PADDED=triton.next_power_of_2(num_groups),
        NUM_CHUNKS=num_chunks,
        CHUNKS_PADDED=triton.next_power_of_2(num_chunks),
        TILE=config.score_tile,
        NUM_BEST=num_best,
        BEST_PADDED=triton.next_power_of_2(width),
        AS_LOGPROBS=as_logprobs,
    )
    return TokenScores(chosen, rank, best[:, :num_best], best_token[:, :num_best], highest, log_total)
