"""The pass over all logits, in Triton: a program reads one chunk of one row, once, for whoever comes after it.

Leaves for each chunk the best token and what a softmax needs, and for each group of G tokens the key of its best: who
looks for tokens above a threshold need only read the groups whose best is above it.
"""

import triton
import triton.language as tl

from jaxllm.kernels.sampling.triton_logits import NO_TOKEN, apply_rules, load_logits, perturb, sort_key


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
    draws,
    chunk_score,
    chunk_token,
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

    The chunk's token is drawn from all of its tokens, in rows that draw so. IS_RAW: the logits under the rules are the
    raw ones, whose keys are left once. IS_LOADED_RAW: they are before the rules.
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
        best, best_S, total = _summarize(raw_SG, 1.0)
        tl.store(raw_max + tl.program_id(0), best)
        tl.store(raw_total + tl.program_id(0), total)
        if not (IS_RAW and HAS_FILTERS):
            tl.store(raw_key + b * NUM_GROUPS + group_S, best_S, mask=group_S < NUM_GROUPS)
    heat = tl.load(temperature + b)
    if HAS_FILTERS:
        best, best_S, total = _summarize(x_SG, tl.where(heat == 0.0, 1.0, heat))
        tl.store(chunk_max + tl.program_id(0), best)
        tl.store(chunk_total + tl.program_id(0), total)
        tl.store(group_key + b * NUM_GROUPS + group_S, best_S, mask=group_S < NUM_GROUPS)
    if tl.load(draws + b) == 1:
        score_SG = x_SG
        if heat != 0.0:
            score_SG = perturb(x_SG, heat, seed, position, b, token_SG)
        score = tl.max(tl.max(score_SG, 1), 0)
        is_best_SG = is_token_SG & (score_SG == score)
        tl.store(chunk_score + tl.program_id(0), score)
        tl.store(chunk_token + tl.program_id(0), tl.min(tl.min(tl.where(is_best_SG, token_SG, NO_TOKEN), 1), 0))


@triton.jit
def _summarize(x_SG, heat):
    """Gives the best of all, the keys of the groups' best, and the sum of exp((x - best) / heat)."""
    best_S = tl.max(x_SG, 1)
    best = tl.max(best_S, 0)
    anchor = tl.where(best == float("-inf"), 0.0, best)
    to_log2 = 1.4426950408889634 / tl.maximum(heat, 1e-30)
    total = tl.sum(tl.sum(tl.exp2((x_SG - anchor) * to_log2), 1), 0)
    return best, sort_key(best_S), total
