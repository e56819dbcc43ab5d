"""The draw, in Triton: of rows without filters the best of a few chunks, of others the best that the filters keep.

A program handles one row. It lists the groups that can hold a kept token, and searches their tokens in registers: all
of them, or, where there are many groups, those above a mark. A row that keeps more than a tile is read as a whole.

No search looks for the edge of a nucleus. What wins among all tokens, and is in the nucleus, wins in the nucleus; and
it is if the mass of all better ones is less than wanted. If it is not, it and all that are worse are out, and the next
one is tried: a token of the nucleus wins each time with its share of the mass.
"""

import triton
import triton.language as tl

from jaxllm.kernels.sampling.triton_groups import list_groups, list_tokens, listed_tokens, mark_groups, search_mark
from jaxllm.kernels.sampling.triton_logits import (
    DRAWS_FROM_ALL,
    DRAWS_FROM_NUCLEUS,
    NO_TOKEN,
    NOWHERE,
    apply_rules,
    bound_perturbed,
    from_key,
    load_logits,
    loosen,
    perturb,
    place,
    placed_key,
    placed_token,
    scale,
    sort_key,
)


@triton.jit
def draw_tokens(
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
    top_k,
    top_p,
    least,
    chunk_bound,
    chunk_max,
    chunk_total,
    group_key,
    token_out,
    listed,
    collected,
    V: tl.constexpr,
    W: tl.constexpr,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    G: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    """Handles row program_id."""
    b = tl.program_id(0)
    c_S = tl.arange(0, CHUNKS_PADDED)
    is_chunk_S = c_S < NUM_CHUNKS
    heat = tl.load(temperature + b)
    winner = tl.full([], 0, tl.int32)
    draws_from = DRAWS_FROM_ALL
    if HAS_FILTERS:
        draws_from = tl.load(mode + b)
    if draws_from == DRAWS_FROM_ALL:
        bound_S = tl.load(chunk_bound + b * NUM_CHUNKS + c_S, mask=is_chunk_S, other=float("-inf"))
        winner, _ = draw_from_chunks(
            bound_S, NOWHERE, 0.0, float("-inf"), logits,
            mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
            temperature, seed, position, b, V, W, E, E_PADDED, CHUNKS_PADDED, CHUNK, HAS_MASK, HAS_PENALTIES, False,
        )  # fmt: skip
    elif HAS_FILTERS:
        k = tl.load(top_k + b)
        p = tl.load(top_p + b)
        least_scaled = tl.load(least + b)
        is_nucleus_only = draws_from == DRAWS_FROM_NUCLEUS
        mine = listed + b * NUM_GROUPS
        my_tokens = collected + b * TILE
        group_N = tl.arange(0, GROUPS_PADDED)
        keys = group_key + b * NUM_GROUPS + group_N
        key_N = tl.load(keys, mask=group_N < NUM_GROUPS, other=NOWHERE)
        top = tl.max(key_N, 0)
        highest = from_key(top)
        key_N = drop_small(key_N, highest, heat, least_scaled)
        num_groups = tl.sum((key_N > NOWHERE).to(tl.int32), 0)
        total = tl.full([], 0.0, tl.float32)
        if is_nucleus_only:
            max_S = tl.load(chunk_max + b * NUM_CHUNKS + c_S, mask=is_chunk_S, other=float("-inf"))
            total_S = tl.load(chunk_total + b * NUM_CHUNKS + c_S, mask=is_chunk_S, other=0.0)
            is_some_S = max_S > float("-inf")
            share_S = tl.exp(scale(tl.where(is_some_S, max_S, highest), highest, heat))
            total = tl.sum(tl.where(is_some_S, total_S * share_S, 0.0), 0)

        # The groups to look at. k groups whose best reach a mark hold k tokens that do. How many a nucleus takes is
        # tried out: all of it is listed if what reaches the list's mark has its mass.
        wanted = tl.where(k > 0, tl.minimum(k, num_groups), tl.where(is_nucleus_only, TILE // G // 2, num_groups))
        mark = tl.full([], NOWHERE, tl.int32)
        is_drawn = tl.full([], 0, tl.int32)
        is_listed = tl.full([], 0, tl.int32)
        held = tl.full([], 0.0, tl.float32)
        enough = total * p
        while is_listed == 0:
            # Read once more: while tokens are searched there is no room for them in registers.
            key_N = tl.load(keys, mask=group_N < NUM_GROUPS, other=NOWHERE)
            key_N = drop_small(key_N, highest, heat, least_scaled)
            mark = mark_groups(key_N, wanted, tl.maximum(TILE // G, wanted + wanted // 4))
            count = list_groups(key_N, group_N, mark, mine)
            num_tokens = tl.full([], 0, tl.int32)
            token_X, is_token_X = listed_tokens(mine, 0, count, V, G, TILE)
            if count > TILE // G:
                # Most tokens of a group are below the mark.
                for start in range(0, count, TILE // G):
                    token_X, is_token_X = listed_tokens(mine, start, count, V, G, TILE)
                    x_X = apply_rules(
                        load_logits(logits, b, token_X, is_token_X, V),
                        mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
                        b, token_X, is_token_X, V, W, E, E_PADDED, HAS_MASK, HAS_PENALTIES,
                    )  # fmt: skip
                    reaches_X = is_token_X & (sort_key(x_X) >= mark) & (scale(x_X, highest, heat) >= least_scaled)
                    num_tokens += list_tokens(token_X, reaches_X, my_tokens, num_tokens, TILE)
                tl.debug_barrier()
                i_X = tl.arange(0, TILE)
                is_token_X = i_X < num_tokens
                token_X = tl.load(my_tokens + i_X, mask=is_token_X, other=0)
            if num_tokens <= TILE:
                x_X = apply_rules(
                    load_logits(logits, b, token_X, is_token_X, V),
                    mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
                    b, token_X, is_token_X, V, W, E, E_PADDED, HAS_MASK, HAS_PENALTIES,
                )  # fmt: skip
                scaled_X = scale(x_X, highest, heat)
                key_X = sort_key(x_X)
                key_X = tl.where(is_token_X & (key_X >= mark) & (scaled_X >= least_scaled), key_X, NOWHERE)
                if k > 0:
                    num_kept = tl.minimum(tl.sum((key_X > NOWHERE).to(tl.int32), 0), k)
                    key_X = tl.where(key_X >= search_mark(key_X, num_kept, num_kept, mark, top), key_X, NOWHERE)
                mass_X = tl.where(key_X > NOWHERE, tl.exp(scaled_X), 0.0)
                held = tl.sum(mass_X, 0)
                enough = tl.where(p < 1.0, p * tl.where(is_nucleus_only, total, held), float("inf"))
                if (not is_nucleus_only) | (count >= num_groups) | (held >= enough):
                    score_key_X = sort_key(perturb(x_X, heat, seed, position, b, token_X))
                    while is_drawn == 0:
                        place_X = tl.where(key_X > NOWHERE, place(score_key_X, token_X), place(NOWHERE, NO_TOKEN))
                        winner = placed_token(tl.max(place_X, 0))
                        own = tl.max(tl.where((key_X > NOWHERE) & (token_X == winner), key_X, NOWHERE), 0)
                        key_X = tl.where(key_X > own, key_X, NOWHERE)
                        better = tl.sum(tl.where(key_X > NOWHERE, mass_X, 0.0), 0)
                        # The best stays, also where a tiny top_p is 0 in float32.
                        is_drawn = ((better < enough) | (own >= top) | (own == NOWHERE)).to(tl.int32)
            # So many groups hold about as many tokens above their mark, the worse ones less mass each than the better.
            needed = (wanted.to(tl.float32) * (enough / tl.maximum(held, 1e-30))).to(tl.int32)
            is_more = is_nucleus_only & (num_tokens <= TILE) & (count < num_groups)
            is_more = is_more & (tl.maximum(wanted, needed) < TILE // 2)
            wanted = tl.minimum(tl.minimum(tl.maximum(wanted * 8, needed * 2), num_groups), TILE // 2)
            is_listed = ((is_drawn == 1) | (not is_more)).to(tl.int32)

        if is_drawn == 0:
            if is_nucleus_only:
                mark = tl.full([], NOWHERE + 1, tl.int32)
            if k > 0:
                num_kept = tl.full([], 0.0, tl.float32) + k
                low = mark.to(tl.int64)
                high = top.to(tl.int64) + 1
                number = num_kept + 1.0
                while (number != num_kept) & (high - low > 1):
                    step = (high - low + 4) // 5
                    last = high - 1
                    held0, held1, held2, held3 = weigh(
                        logits,
                        mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
                        b,
                        tl.minimum(low + step, last).to(tl.int32), tl.minimum(low + step * 2, last).to(tl.int32),
                        tl.minimum(low + step * 3, last).to(tl.int32), tl.minimum(low + step * 4, last).to(tl.int32),
                        highest, heat, least_scaled, True, V, W, E, E_PADDED, TILE, HAS_MASK, HAS_PENALTIES,
                    )  # fmt: skip
                    reached, number = last_enough(held0, held1, held2, held3, num_kept, number)
                    high = tl.minimum(high, low + step * (reached + 1))
                    low = tl.minimum(low + step * reached, last)
                mark = low.to(tl.int32)
            enough = p * total
            if (p < 1.0) & (not is_nucleus_only):
                held, _, _, _ = weigh(
                    logits,
                    mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
                    b, mark, NO_TOKEN, NO_TOKEN, NO_TOKEN,
                    highest, heat, least_scaled, False, V, W, E, E_PADDED, TILE, HAS_MASK, HAS_PENALTIES,
                )  # fmt: skip
                enough = p * held

            bound_S = tl.full([CHUNKS_PADDED], float("-inf"), tl.float32)
            token_X = tl.arange(0, CHUNK)
            loaded_X = load_logits(logits, b, token_X, token_X < V, V)
            for c in range(NUM_CHUNKS):
                next_loaded_X = load_logits(logits, b, token_X + CHUNK, token_X + CHUNK < V, V)
                x_X = apply_rules(
                    loaded_X,
                    mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
                    b, token_X, token_X < V, V, W, E, E_PADDED, HAS_MASK, HAS_PENALTIES,
                )  # fmt: skip
                bound = loosen(tl.max(bound_perturbed(x_X, heat, seed, position, b, token_X), 0))
                bound_S = tl.where(c_S == c, bound, bound_S)
                token_X += CHUNK
                loaded_X = next_loaded_X
            sure = top  # who reaches it is in the nucleus
            while is_drawn == 0:
                winner, own = draw_from_chunks(
                    bound_S, mark, highest, least_scaled, logits,
                    mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
                    temperature, seed, position, b, V, W, E, E_PADDED, CHUNKS_PADDED, CHUNK, HAS_MASK, HAS_PENALTIES,
                    True,
                )  # fmt: skip
                is_drawn = ((p >= 1.0) | (own >= sure) | (own == NOWHERE)).to(tl.int32)
                if is_drawn == 0:
                    # The mass above it, and above some that are better, for the turns to come.
                    step = (sure.to(tl.int64) - own) // 4
                    low = own.to(tl.int64) + 1
                    held0, held1, held2, held3 = weigh(
                        logits,
                        mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
                        b,
                        low.to(tl.int32), (low + step).to(tl.int32), (low + step * 2).to(tl.int32),
                        (low + step * 3).to(tl.int32),
                        highest, heat, least_scaled, False, V, W, E, E_PADDED, TILE, HAS_MASK, HAS_PENALTIES,
                    )  # fmt: skip
                    is_drawn = (held0 < enough).to(tl.int32)
                    reached, _ = last_enough(held0, held1, held2, held3, enough, held0)
                    mark = (low + step * tl.maximum(reached - 1, 0)).to(tl.int32)
                    sure = tl.where(reached < 4, (low + step * reached).to(tl.int32), sure)
    tl.store(token_out + b, tl.where(winner == NO_TOKEN, 0, winner))


@triton.jit
def drop_small(key_N, highest, heat, least_scaled):
    """The keys that min_p leaves; NOWHERE in place of the others."""
    if least_scaled > float("-inf"):
        key_N = tl.where(scale(from_key(key_N), highest, heat) >= least_scaled, key_N, NOWHERE)
    return key_N


@triton.jit
def draw_from_chunks(
    bound_S, mark, highest, least_scaled,
    logits, mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
    temperature, seed, position, b,
    V: tl.constexpr, W: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr, CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr, HAS_MASK: tl.constexpr, HAS_PENALTIES: tl.constexpr, IS_FILTERED: tl.constexpr,
):  # fmt: skip
    """Draws among the tokens that reach the mark and are left by min_p, given bounds on what chunks hold; gives the
    token, NO_TOKEN if there is none, and the key of its logit.

    From the chunk of the best prospects on, as long as there is one that may hold a better token.
    """
    heat = tl.load(temperature + b)
    c_S = tl.arange(0, CHUNKS_PADDED)
    bound = tl.max(bound_S, 0)
    best_score = tl.full([], float("-inf"), tl.float32)
    best_place = place(NOWHERE, NO_TOKEN)
    best_key = tl.full([], NOWHERE, tl.int32)
    while (bound > float("-inf")) & ((bound > best_score) | ((bound == best_score) & (heat != 0.0))):
        c = tl.min(tl.where(bound_S == bound, c_S, NO_TOKEN), 0)
        token_X = c * CHUNK + tl.arange(0, CHUNK)
        is_kept_X = token_X < V
        x_X = apply_rules(
            load_logits(logits, b, token_X, is_kept_X, V),
            mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
            b, token_X, is_kept_X, V, W, E, E_PADDED, HAS_MASK, HAS_PENALTIES,
        )  # fmt: skip
        if IS_FILTERED:
            is_kept_X = is_kept_X & (sort_key(x_X) >= mark) & (scale(x_X, highest, heat) >= least_scaled)
        score_X = x_X
        if heat != 0.0:
            score_X = perturb(x_X, heat, seed, position, b, token_X)
        place_X = tl.where(is_kept_X, place(sort_key(score_X), token_X), place(NOWHERE, NO_TOKEN))
        chunk_place = tl.max(place_X, 0)
        if chunk_place > best_place:
            best_place = chunk_place
            best_score = from_key(placed_key(chunk_place))
            if IS_FILTERED:
                best_key = tl.max(tl.where(place_X == chunk_place, sort_key(x_X), NOWHERE), 0)
        bound_S = tl.where(c_S == c, float("-inf"), bound_S)
        bound = tl.max(bound_S, 0)
    return placed_token(best_place), best_key


@triton.jit
def last_enough(held0, held1, held2, held3, enough, held):
    """Gives how many of four falling numbers are enough, and the last of them; if there is none, `held`."""
    reached = (held0 >= enough).to(tl.int64) + (held1 >= enough) + (held2 >= enough) + (held3 >= enough)
    held = tl.where(held0 >= enough, held0, held)
    held = tl.where(held1 >= enough, held1, held)
    held = tl.where(held2 >= enough, held2, held)
    return reached, tl.where(held3 >= enough, held3, held)


@triton.jit
def weigh(
    logits, mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
    b, mark0, mark1, mark2, mark3, highest, heat, least_scaled, by_count,
    V: tl.constexpr, W: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr, TILE: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    """Gives number or mass of a row's tokens that reach each of four marks and are left by min_p."""
    # Summed up at the end: a sum over threads takes long.
    held0_X = tl.zeros([TILE], tl.float32)
    held1_X = tl.zeros([TILE], tl.float32)
    held2_X = tl.zeros([TILE], tl.float32)
    held3_X = tl.zeros([TILE], tl.float32)
    token_X = tl.arange(0, TILE)
    loaded_X = load_logits(logits, b, token_X, token_X < V, V)
    for _ in range(0, V, TILE):
        # The next tile is on its way while this one is weighed.
        next_loaded_X = load_logits(logits, b, token_X + TILE, token_X + TILE < V, V)
        x_X = apply_rules(
            loaded_X, mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
            b, token_X, token_X < V, V, W, E, E_PADDED, HAS_MASK, HAS_PENALTIES,
        )  # fmt: skip
        scaled_X = scale(x_X, highest, heat)
        weight_X = tl.where(by_count, 1.0, tl.exp(scaled_X))
        weight_X = tl.where((token_X < V) & (scaled_X >= least_scaled), weight_X, 0.0)
        key_X = sort_key(x_X)
        held0_X += tl.where(key_X >= mark0, weight_X, 0.0)
        held1_X += tl.where(key_X >= mark1, weight_X, 0.0)
        held2_X += tl.where(key_X >= mark2, weight_X, 0.0)
        held3_X += tl.where(key_X >= mark3, weight_X, 0.0)
        token_X += TILE
        loaded_X = next_loaded_X
    return tl.sum(held0_X, 0), tl.sum(held1_X, 0), tl.sum(held2_X, 0), tl.sum(held3_X, 0)
