"""Attention of requests with many new tokens in Pallas Mosaic GPU, for Hopper: tiles of new tokens over paged keys.

Knows one layer's queries, the block table and a list of tiles. Refuses to know which requests take another kernel.

A block of the grid stays on its multiprocessor and takes items, a tile for some query heads of one KV head, until none
is left. One warpgroup copies queries and whole pages into shared memory (TMA), ahead of the other two, which multiply
them with `wgmma`, one in its softmax while the other multiplies (Shah et al., 2024, "FlashAttention-3").
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxllm.kernels.e4m3.reference import E4M3
from jaxllm.kernels.launch import num_multiprocessors
from jaxllm.kernels.paged_attention.work_list import TileList

ROWS = 64  # of one warpgroup's matrix product
ALIGNMENT = 8  # tokens: rows of a swizzle, which a copy cannot begin within
BLOCK_SIZES = (16, 32, 64, 128)  # a page is copied whole, and a tile of keys holds whole pages
HEAD_DIMS = (64, 128)
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class MosaicConfig:
    """Keys of one turn of the loop, and how many turns' keys and values are in shared memory at a time."""

    tile_keys: int = 128
    num_buffers: int = 2

    def tile_tokens(self, group: int) -> int:
        """Tokens whose heads fill the rows of both warpgroups."""
        return 2 * (ROWS // heads_at_once(group))


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that the kernel is compiled for, in the project's letters, and the constants of the softmax."""

    N: int
    K: int
    H: int
    C: int
    P: int
    M: int
    tile_keys: int
    num_buffers: int
    num_blocks: int
    scale: float
    softcap: float | None
    has_window: bool
    is_interpreted: bool

    @property
    def heads(self) -> int:
        """Query heads of an item: the rows of a warpgroup are those of the first head, of the second, and so on."""
        return heads_at_once(self.N // self.K)

    @property
    def tokens(self) -> int:
        """Tokens of one warpgroup."""
        return ROWS // self.heads

    @property
    def pages(self) -> int:
        """Pages of one turn."""
        return self.tile_keys // self.C


def heads_at_once(group: int) -> int:
    """Query heads of a group that share a tile: a power of 2, with at least ALIGNMENT tokens each."""
    return math.gcd(group, ROWS // ALIGNMENT)


def find_obstacle(
    num_tokens: int, head_dim: int, block_size: int, dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> str | None:
    """Says in a few words why the kernel does not take a batch of these sizes and types; None where it does."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 and float16, not {jnp.dtype(dtype).name}"
    if cache_dtype != dtype:
        kept = "e4m3" if cache_dtype == E4M3 else jnp.dtype(cache_dtype).name
        return f"the cache is {kept}, the queries are {jnp.dtype(dtype).name}"
    if head_dim not in HEAD_DIMS:
        return f"the head size is {head_dim}, not one of {_join(HEAD_DIMS)}"
    if block_size not in BLOCK_SIZES:
        return f"the block size is {block_size}, not one of {_join(BLOCK_SIZES)}"
    if num_tokens % ALIGNMENT:
        return f"the batch's {num_tokens} tokens are no multiple of {ALIGNMENT}"
    return None


def choose_config(head_dim: int) -> MosaicConfig:
    """Constants whose buffers fit the 227 KiB of shared memory of a block."""
    return MosaicConfig(num_buffers=4 if head_dim <= 64 else 2)


# A model's layers share what is traced and lowered here: seconds for each.
@functools.partial(jax.jit, static_argnames=("scale", "softcap", "config", "interpret"))
def prefill(
    query: Float[Array, "T N H"],
    kv_cache: Float[Array, "L P 2 K C H"],
    layer: int | Int[Array, ""],
    block_table: Int[Array, "B M"],
    tiles: TileList,
    *,
    context_len: Int[Array, " B"],
    scale: float,
    window: int | Int[Array, ""] | None,
    softcap: float | None,
    config: MosaicConfig,
    interpret: Any = None,
) -> Float[Array, "T N H"]:
    """Attention of the tokens in the list of tiles; the others' rows are left unwritten.

    The tiles are aligned to ALIGNMENT tokens; so is the number of tokens T.
    """
    N, H = query.shape[1:]
    L, P, _, K, C = kv_cache.shape[:5]
    items = tiles.tile.shape[0] * (N // heads_at_once(N // K))
    num_blocks = min(num_multiprocessors(), items)
    sizes = Sizes(
        N, K, H, C, P, block_table.shape[1], config.tile_keys, config.num_buffers, num_blocks, scale, softcap,
        window is not None, interpret is not None,
    )  # fmt: skip
    layer_1 = jnp.asarray(layer, jnp.int32).reshape(1)
    window_1 = layer_1 if window is None else jnp.asarray(window, jnp.int32).reshape(1)
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    rows = functools.partial(plgpu.SMEM, (2, ROWS, H), query.dtype)
    keys = plgpu.SMEM((config.num_buffers, config.tile_keys, H), query.dtype, transforms=swizzled)
    run = plgpu.kernel(
        functools.partial(_prefill_tiles, sizes),
        out_type=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="mosaic_prefill_tiles",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        scratch_types={
            "q": rows(transforms=swizzled),
            "k": keys,
            "v": keys,
            "out": rows(transforms=swizzled),
            "row": rows(),
            "q_full": plgpu.Barrier(num_arrivals=sizes.heads, num_barriers=2),
            "q_free": plgpu.Barrier(num_barriers=2),
            "k_full": plgpu.Barrier(num_arrivals=sizes.pages, num_barriers=config.num_buffers),
            "v_full": plgpu.Barrier(num_arrivals=sizes.pages, num_barriers=config.num_buffers),
            "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=config.num_buffers),
            "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=config.num_buffers),
            "turn": plgpu.Barrier(num_arrivals=2),
        },
    )
    pages = kv_cache.reshape(L * P * 2 * K, C, H)
    return run(query, pages, block_table, tiles.tile, context_len, layer_1, window_1, tiles.num_tiles)


class Given(NamedTuple):
    """What the kernel is called with, and its result, in device memory."""

    query: Any
    pages: Any
    block_table: Any
    tiles: Any
    context_len: Any
    layer: Any
    window: Any
    num_tiles: Any
    out: Any


class Shared(NamedTuple):
    """Shared memory: queries, keys and values, rows on their way out, and the barriers.

    A buffer is full when its copies have arrived, and free when those who read it are done.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    row: Any
    q_full: Any
    q_free: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    turn: Any


def _prefill_tiles(sizes: Sizes, *refs, **scratch) -> None:
    """Divides the work among the three warpgroups."""
    given, shared = Given(*refs), Shared(**scratch)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        _compute(sizes, warpgroup, given, shared)

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        _load(sizes, given, shared)


@dataclass(frozen=True, slots=True)
class Item:
    """A tile for some heads. Its rows begin at an aligned token; those of begin:end are the tile's own.

    The position is that of the first row, the turns of keys are first:last.
    """

    request: jax.Array
    token: jax.Array
    begin: jax.Array
    end: jax.Array
    position: jax.Array
    head: jax.Array
    first: jax.Array
    last: jax.Array


def _count_items(sizes: Sizes, num_tiles) -> tuple[jax.Array, Any]:
    """Gives this block's number of items and the function from its own counter to the item's number.

    The items are in descending order of length; a block takes its turn first in one round and last in the next, so
    that all get about the same.
    """
    block = lax.axis_index("block")
    num_items = num_tiles[0] * (sizes.N // sizes.heads)
    num_blocks = jnp.int32(sizes.num_blocks)

    def number(n):
        is_odd = lax.rem(n, jnp.int32(2)) == 1
        return n * num_blocks + jnp.where(is_odd, num_blocks - 1 - block, block)

    rounds = lax.div(num_items, num_blocks)
    return rounds + (number(rounds) < num_items).astype(jnp.int32), number


def _describe(sizes: Sizes, number: jax.Array, given: Given) -> Item:
    per_tile = jnp.int32(sizes.N // sizes.heads)
    tile = lax.div(number, per_tile)
    head = lax.rem(number, per_tile) * sizes.heads
    request, token, num_tokens, position = (given.tiles[tile, field] for field in range(4))
    begin = token & (ALIGNMENT - 1)
    last = lax.div(jnp.maximum(position + num_tokens, 0) + (sizes.tile_keys - 1), jnp.int32(sizes.tile_keys))
    first = jnp.int32(0)
    if sizes.has_window:
        first = lax.div(jnp.maximum(position - given.window[0] + 1, 0), jnp.int32(sizes.tile_keys))
        first = jnp.minimum(first, last)
    return Item(request, token - begin, begin, begin + num_tokens, position - begin, head, first, last)


def _load(sizes: Sizes, given: Given, shared: Shared) -> None:
    """Copies each item's queries, and the pages of its keys and values as buffers become free."""
    num_buffers = jnp.int32(sizes.num_buffers)
    num_items, number = _count_items(sizes, given.num_tiles)
    layer_page = given.layer[0] * sizes.P

    def wait_until_free(free, use):
        plgpu.barrier_wait(free.at[lax.rem(use, num_buffers)])

    def load_item(n, done):
        item = _describe(sizes, number(n), given)
        kv_head = lax.div(item.head, jnp.int32(sizes.N // sizes.K))

        def find_pages(i):
            # Columns behind the table's end hold no key that anyone sees.
            columns = [jnp.minimum(i * sizes.pages + p, sizes.M - 1) for p in range(sizes.pages)]
            blocks = [given.block_table[item.request, column] for column in columns]
            return [(layer_page + block) * (2 * sizes.K) + kv_head for block in blocks]

        def load(pages, buffer, full, free, use):
            slot = lax.rem(use, num_buffers)
            pl.when(use >= num_buffers)(lambda: wait_until_free(free, use - num_buffers))
            for p, page in enumerate(pages):
                place = buffer.at[slot, pl.ds(p * sizes.C, sizes.C)]
                plgpu.copy_gmem_to_smem(given.pages.at[page], place, full.at[slot])

        def load_keys(pages, use):
            load(pages, shared.k, shared.k_full, shared.k_free, use)

        def load_values(pages, use):
            load([page + sizes.K for page in pages], shared.v, shared.v_full, shared.v_free, use)

        def load_turn(i, use):
            pages = find_pages(i)
            load_keys(pages, use)
            load_values(pages, use)
            return use + 1

        # A buffer for the first keys is free before that for the queries: the last item still uses those.
        has_keys = item.first < item.last
        pages = find_pages(item.first)
        pl.when(has_keys)(lambda: load_keys(pages, done))
        for warpgroup in range(2):
            pl.when(n > 0)(functools.partial(plgpu.barrier_wait, shared.q_free.at[warpgroup]))
            # Behind the last token of all come zeros.
            tokens = pl.ds(pl.multiple_of(item.token + warpgroup * sizes.tokens, ALIGNMENT), sizes.tokens)
            for h in range(sizes.heads):
                rows = shared.q.at[warpgroup, pl.ds(h * sizes.tokens, sizes.tokens)]
                plgpu.copy_gmem_to_smem(given.query.at[tokens, item.head + h], rows, shared.q_full.at[warpgroup])
        pl.when(has_keys)(lambda: load_values(pages, done))
        return lax.fori_loop(item.first + 1, item.last, load_turn, done + has_keys.astype(jnp.int32))

    done = lax.fori_loop(jnp.int32(0), num_items, load_item, jnp.int32(0))

    def drain(use, _):
        wait_until_free(shared.k_free, use)
        wait_until_free(shared.v_free, use)

    lax.fori_loop(jnp.maximum(done - num_buffers, 0), done, drain, None)
    for warpgroup in range(2):
        pl.when(num_items > 0)(functools.partial(plgpu.barrier_wait, shared.q_free.at[warpgroup]))


def _compute(sizes: Sizes, warpgroup, given: Given, shared: Shared) -> None:
    """Attends to each item's keys with this warpgroup's half of its tokens, and writes the outcome."""
    num_buffers = jnp.int32(sizes.num_buffers)
    num_items, number = _count_items(sizes, given.num_tiles)
    own_q, own_q_free = shared.q.at[warpgroup], shared.q_free.at[warpgroup]
    tile = (ROWS, sizes.tile_keys)
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    to_log2 = LOG2_E * (sizes.scale if sizes.softcap is None else 1.0)

    def take_turn():
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.turn)

    def attend_item(n, done):
        item = _describe(sizes, number(n), given)
        position = item.position + warpgroup * sizes.tokens
        context = given.context_len[item.request]

        def attend_keys(i, carry, is_causal, is_windowed):
            acc_RH, best_R, total_R = carry
            use = done + i - item.first
            slot = lax.rem(use, num_buffers)

            def multiply_keys(score_ref):
                plgpu.wgmma(score_ref, own_q, shared.k.at[slot].transpose((1, 0)))
                take_turn()
                return score_ref[...]

            score_RX = pl.run_scoped(multiply_keys, plgpu.WGMMAAccumulatorRef(tile, jnp.float32))
            plgpu.barrier_arrive(shared.k_free.at[slot])
            pl.when(i == item.last - 1)(functools.partial(plgpu.barrier_arrive, own_q_free))
            if sizes.softcap is not None:
                # tanh(x) = 1 - 2 / (exp(2 x) + 1), in base 2; it is right for infinite exponentials too.
                turned_RX = jnp.exp2(score_RX * (2 * LOG2_E * sizes.scale / sizes.softcap))
                score_RX = (1.0 - 2.0 / (turned_RX + 1.0)) * sizes.softcap
            if is_causal or is_windowed:
                row_RX = plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=plgpu.Layout.WGMMA)
                key_RX = plgpu.broadcasted_iota(jnp.int32, tile, 1, layout=plgpu.Layout.WGMMA)
                # How far behind the row's token the key is.
                behind_RX = (row_RX & (sizes.tokens - 1)) + (position - i * sizes.tile_keys) - key_RX
                if is_causal:
                    score_RX = jnp.where(behind_RX >= 0, score_RX, -jnp.inf)
                if is_windowed:
                    score_RX = jnp.where(behind_RX < given.window[0], score_RX, -jnp.inf)
            new_best_R = jnp.maximum(best_R, score_RX.max(axis=1) * to_log2)
            anchor_R = new_best_R
            if sizes.has_window:  # a row may have seen nothing yet
                anchor_R = jnp.where(new_best_R == -jnp.inf, 0.0, new_best_R)
            shrink_R = jnp.exp2(best_R - anchor_R)
            weight_RX = jnp.exp2(score_RX * to_log2 - lax.broadcast_in_dim(anchor_R, tile, [0]))
            acc_RH = acc_RH * lax.broadcast_in_dim(shrink_R, acc_RH.shape, [0])
            total_R = total_R * shrink_R + weight_RX.sum(axis=1)
            cast_RX = weight_RX.astype(given.query.dtype)
            acc_RH, total_R, new_best_R, cast_RX = lax.optimization_barrier((acc_RH, total_R, new_best_R, cast_RX))
            plgpu.barrier_arrive(shared.turn)
            plgpu.barrier_wait(shared.v_full.at[slot])
            if is_causal:
                _clear_unused(sizes, shared.v.at[slot], context - i * sizes.tile_keys)
            plgpu.barrier_wait(shared.turn)
            has_next, next_full = i + 1 < item.last, shared.k_full.at[lax.rem(use + 1, num_buffers)]

            def add_values(acc_ref):
                plgpu.wgmma(acc_ref, cast_RX, shared.v.at[slot])
                pl.when(has_next)(functools.partial(plgpu.barrier_wait, next_full))

            if sizes.is_interpreted:  # the interpreter has no wgmma with an operand in registers
                pl.when(has_next)(functools.partial(plgpu.barrier_wait, next_full))
                acc_RH += jnp.dot(cast_RX, shared.v[slot], preferred_element_type=jnp.float32)
            else:
                acc_RH = pl.run_state(add_values)(plgpu.WGMMAAccumulatorRef.init(acc_RH))
            plgpu.barrier_arrive(shared.v_free.at[slot])
            return acc_RH, new_best_R, total_R

        carry = (
            plgpu.layout_cast(jnp.zeros((ROWS, sizes.H), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), row_layout),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row_layout),
        )
        plgpu.barrier_wait(shared.q_full.at[warpgroup])

        @pl.when(item.first < item.last)
        def _():
            plgpu.barrier_wait(shared.k_full.at[lax.rem(done, num_buffers)])

        @pl.when(item.first == item.last)
        def _():
            plgpu.barrier_arrive(own_q_free)

        pl.when(warpgroup == 1)(take_turn)
        # All rows see the keys of the turns clear:causal; those before and behind need a look at each row.
        clear, causal = item.first, lax.div(jnp.maximum(position + 1, 0), jnp.int32(sizes.tile_keys))
        if sizes.has_window:
            oldest = jnp.maximum(position + sizes.tokens - given.window[0], 0)
            clear = jnp.minimum(lax.div(oldest + (sizes.tile_keys - 1), jnp.int32(sizes.tile_keys)), item.last)
            clear = jnp.maximum(clear, item.first)
        causal = jnp.maximum(jnp.minimum(causal, item.last), clear)
        if sizes.has_window:
            begin = functools.partial(attend_keys, is_causal=True, is_windowed=True)
            carry = lax.fori_loop(item.first, clear, begin, carry)
        carry = lax.fori_loop(clear, causal, functools.partial(attend_keys, is_causal=False, is_windowed=False), carry)
        end = functools.partial(attend_keys, is_causal=True, is_windowed=sizes.has_window)
        acc_RH, _, total_R = lax.fori_loop(causal, item.last, end, carry)
        pl.when(warpgroup == 0)(take_turn)
        total_R = jnp.where(total_R == 0.0, 1.0, total_R)
        out_RH = (acc_RH / lax.broadcast_in_dim(total_R, acc_RH.shape, [0])).astype(given.query.dtype)
        _write(sizes, item, warpgroup, out_RH, given.out, shared.out.at[warpgroup], shared.row.at[warpgroup])
        return done + item.last - item.first

    lax.fori_loop(jnp.int32(0), num_items, attend_item, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _clear_unused(sizes: Sizes, v_ref, num_keys: jax.Array) -> None:
    """Makes the values behind a request's last key zero: a weight of zero does not help against NaN.

    Both warpgroups do it, each for itself: they write the same.
    """

    @pl.when(num_keys < sizes.tile_keys)
    def _():
        for begin in range(0, sizes.tile_keys, ROWS):
            part = v_ref.at[pl.ds(begin, ROWS)]
            key_XH = plgpu.broadcasted_iota(jnp.int32, (ROWS, sizes.H), 0, layout=plgpu.Layout.WGMMA)
            v_XH = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(key_XH + begin < num_keys, v_XH, jnp.zeros_like(v_XH))
        plgpu.commit_smem()


def _write(sizes: Sizes, item: Item, warpgroup, out_RH, out_ref, whole_ref, row_ref) -> None:
    """Copies the rows of a warpgroup's tokens out: at once where all are the tile's own, or row by row.

    The copy goes on while the next item is computed.
    """
    token = pl.multiple_of(item.token + warpgroup * sizes.tokens, ALIGNMENT)
    begin, end = (jnp.clip(row - warpgroup * sizes.tokens, 0, sizes.tokens) for row in (item.begin, item.end))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(end - begin == sizes.tokens)
    def _():
        whole_ref[...] = out_RH
        plgpu.commit_smem()
        for h in range(sizes.heads):
            rows = whole_ref.at[pl.ds(h * sizes.tokens, sizes.tokens)]
            plgpu.copy_smem_to_gmem(rows, out_ref.at[pl.ds(token, sizes.tokens), item.head + h])

    @pl.when((begin < end) & (end - begin < sizes.tokens))
    def _():
        row_ref[...] = out_RH
        plgpu.commit_smem()

        def copy_token(t, _):
            for h in range(sizes.heads):
                row = row_ref.at[pl.ds(h * sizes.tokens + t, 1)]
                plgpu.copy_smem_to_gmem(row, out_ref.at[pl.ds(token + t, 1), item.head + h])

        lax.fori_loop(begin, end, copy_token, None)


def _join(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
