"""Adds up the parts of a request whose context was split into chunks, in the program that finishes last.

Knows the parts as they lie in memory. Refuses to know how they were computed. The chunks of a request and KV head count
their arrivals; who comes last weighs all parts in their order, whatever order they came in, so results repeat bit by
bit. A kernel of its own would be one more launch in every layer, and most often have nothing to do.
"""

import triton
import triton.language as tl

from jaxllm.kernels.paged_attention.triton_softmax import begin_softmax

MOST_ELEMENTS = 32  # of parts on their way at once, of each thread
TILE_SUMS = tl.constexpr(64)  # log-sums of parts that are read at once


def parts_at_once(rows: int, head_dim: int, num_warps: int) -> int:
    """How many parts of so many rows a program reads before it adds the first: what its threads' registers hold."""
    held = triton.next_power_of_2(rows) * triton.next_power_of_2(head_dim)
    return max(1, min(16, MOST_ELEMENTS * num_warps * 32 // held))


@triton.jit
def combine_if_last(
    arrived,
    part_out,
    part_lse,
    first_part,
    num_parts,
    first_token,
    num_rows,
    head,
    sinks,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_2: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Arrives with this program's part written; the last of num_parts writes the rows of the request and KV head.

    `arrived` points to the count, 0 before the first and again after the last: no one else has to clear it.
    """
    G: tl.constexpr = N // K
    tl.debug_barrier()  # what all threads have written is seen by whoever sees the count
    if tl.atomic_add(arrived, 1, sem="acq_rel") == num_parts - 1:
        tl.store(arrived, 0)
        r_R = tl.arange(0, ROWS_2)
        d_H = tl.arange(0, H_PADDED)
        is_row_R = r_R < num_rows
        is_real_RH = is_row_R[:, None] & (d_H[None, :] < H)
        # A part's rows follow each other, those of the next are K * ROWS further on. Nothing is read from the
        # multiprocessor's own cache, which others' writes do not reach.
        row_R = (first_part * K + head).to(tl.int64) * ROWS + r_R
        best_R, total_R = begin_softmax(sinks, head * G + r_R % G, True, HAS_SINKS)
        s_S = tl.arange(0, TILE_SUMS)
        for start in range(0, num_parts, TILE_SUMS):
            row_SR = row_R[None, :] + (start + s_S)[:, None] * (K * ROWS)
            is_real_SR = (start + s_S < num_parts)[:, None] & is_row_R[None, :]
            lse_SR = tl.load(part_lse + row_SR, mask=is_real_SR, other=float("-inf"), cache_modifier=".cg")
            new_best_R = tl.maximum(best_R, tl.max(lse_SR, 0))
            anchor_R = tl.where(new_best_R == float("-inf"), 0.0, new_best_R)
            total_R = total_R * tl.exp2(best_R - anchor_R) + tl.sum(tl.exp2(lse_SR - anchor_R[None, :]), 0)
            best_R = new_best_R
        anchor_R = tl.where(best_R == float("-inf"), 0.0, best_R)
        a_A = tl.arange(0, AT_ONCE)
        acc_RH = tl.zeros([ROWS_2, H_PADDED], tl.float32)
        for start in range(0, num_parts, AT_ONCE):
            row_AR = row_R[None, :] + (start + a_A)[:, None] * (K * ROWS)
            is_part_A = start + a_A < num_parts
            is_real_AR = is_part_A[:, None] & is_row_R[None, :]
            part_ARH = tl.load(
                part_out + row_AR[:, :, None] * H + d_H[None, None, :],
                mask=is_part_A[:, None, None] & is_real_RH[None, :, :],
                other=0.0,
                cache_modifier=".cg",
            )
            lse_AR = tl.load(part_lse + row_AR, mask=is_real_AR, other=float("-inf"), cache_modifier=".cg")
            acc_RH += tl.sum(part_ARH * tl.exp2(lse_AR - anchor_R[None, :])[:, :, None], 0)
        out_RH = acc_RH / tl.where(total_R == 0.0, 1.0, total_R)[:, None]
        head_R = (first_token + r_R // G).to(tl.int64) * N + head * G + r_R % G
        tl.store(out + head_R[:, None] * H + d_H[None, :], out_RH.to(out.dtype.element_ty), mask=is_real_RH)
