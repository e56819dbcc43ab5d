"""The pass over all logits, in Triton: a program reads one chunk of one row, once, for whoever comes after it.

Leaves for each chunk how good a draw it can hold at most and what a softmax needs, and for each group of G tokens the
key of its best: who looks for tokens above a threshold need only read the groups whose best is above it.
"""

import triton
import triton.language as tl

from jaxllm.kernels.sampling.triton_logits import (
    DRAWS_FROM_ALL,
    DRAWS_FROM_NUCLEUS,
    apply_rules,
    bound_perturbed,
    load_logits,
    loosen,
    sort_key,
)


@triton.jit
def scan_logits(
    raw,
    logits,
    mask,
    edit_request,
    edit_token,
    edit_value,
    counts,
    row,
    repetition,
    frequency,
    presence,
    temperature,
    seed,
    position,
    mode,
    chunk_bound,
    chunk_max,
    chunk_total,
    group_key,
    raw_max,
    raw_total,
    raw_key,
    V: tl.constexpr,
    W: tl.constexpr,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    G: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    IS_LOADED_RAW: tl.constexpr,
    IS_RAW: tl.constexpr,
):
    """Handles chunk program_id % NUM_CHUNKS of row program_id // NUM_CHUNKS.

    IS_RAW: the logits under the rules are the raw ones, whose keys are left once, by rows that are filtered or not.
    IS_LOADED_RAW: they are before the rules.
    """
    b = tl.program_id(0) // NUM_CHUNKS
    c = tl.program_id(0) % NUM_CHUNKS
    group_S = c * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)
    token_SG = group_S[:, None] * G + tl.arange(0, G)[None, :]
    is_token_SG = token_SG < V
    loaded_SG = load_logits(logits, b, token_SG, is_token_SG, V)
    x_SG = apply_rules(
        loaded_SG, mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
        b, token_SG, is_token_SG, V, W, E, E_PADDED, HAS_MASK, HAS_PENALTIES,
    )  # fmt: skip
    if HAS_SCORES:
        raw_SG = loaded_SG
        if not IS_LOADED_RAW:
            raw_SG = load_logits(raw, b, token_SG, is_token_SG, V)
        best_S = tl.max(raw_SG, 1)
        best = tl.max(best_S, 0)
        tl.store(raw_max + tl.program_id(0), best)
        tl.store(raw_total + tl.program_id(0), _sum_exp(raw_SG, best, 1.0))
        tl.store(raw_key + b * NUM_GROUPS + group_S, sort_key(best_S), mask=group_S < NUM_GROUPS)
    heat = tl.load(temperature + b)
    draws_from = DRAWS_FROM_ALL
    if HAS_FILTERS:
        draws_from = tl.load(mode + b)
    if draws_from == DRAWS_FROM_ALL:
        bound_SG = x_SG
        if heat != 0.0:
            bound_SG = bound_perturbed(x_SG, heat, seed, position, b, token_SG)
        bound = tl.max(tl.max(bound_SG, 1), 0)
        tl.store(chunk_bound + tl.program_id(0), tl.where(heat == 0.0, bound, loosen(bound)))
    elif HAS_FILTERS:
        best_S = tl.max(x_SG, 1)
        best = tl.max(best_S, 0)
        tl.store(chunk_max + tl.program_id(0), best)
        if not (IS_RAW and HAS_SCORES):
            tl.store(group_key + b * NUM_GROUPS + group_S, sort_key(best_S), mask=group_S < NUM_GROUPS)
        if draws_from == DRAWS_FROM_NUCLEUS:
            tl.store(chunk_total + tl.program_id(0), _sum_exp(x_SG, best, heat))


@triton.jit
def _sum_exp(x_SG, best, heat):
    """Gives the sum of exp((x - best) / heat)."""
    anchor = tl.where(best == float("-inf"), 0.0, best)
    to_log2 = 1.4426950408889634 / tl.maximum(heat, 1e-30)
    return tl.sum(tl.sum(tl.exp2((x_SG - anchor) * to_log2), 1), 0)
