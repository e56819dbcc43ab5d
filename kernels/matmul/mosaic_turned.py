"""The product of a step's rows with one layer's matrix in Pallas Mosaic GPU, for Hopper, computed turned: W^T x^T.

Knows the matrices of all layers as one array, and the number of the layer. Refuses to know when it is worth it.

`wgmma` multiplies 64 rows by 8 to 256 columns. With the step's rows as its columns a matrix product of few rows wastes
nothing, and the weights, of which there are many, fill its 64 rows. A block keeps to its multiprocessor and takes tiles
until none is left. One warpgroup copies the weights and the rows of a turn into shared memory (TMA), ahead of the other
two, which multiply them. The blocks of a cluster take neighbouring outputs and the same rows, of which each fetches a
share for all: what multiprocessors draw from the L2 cache is what limits products of a few hundred rows.

Where the tiles are fewer than the multiprocessors, the inputs are split into parts. Their float32 sums are added by
XLA, in a fixed order, so that results repeat bit by bit.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxllm.kernels.launch import num_multiprocessors
from jaxllm.kernels.matmul.choice import Stack, TurnedConfig

SWIZZLE = 128  # bytes
WRITTEN_BYTES = 4096  # at a time, by a warpgroup


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that the kernel is compiled for."""

    config: TurnedConfig
    num_tiles_out: int  # of a cluster
    num_tiles_rows: int
    num_turns: int  # of a part
    num_clusters: int
    transposed: bool

    @property
    def outputs(self) -> int:
        """Of a block: each of its two warpgroups has half of them."""
        return 2 * self.config.tile_out

    @property
    def num_items(self) -> int:
        return self.num_tiles_out * self.num_tiles_rows * self.config.split


def multiply(
    config: TurnedConfig, x: Float[Array, "T I"], stack: Stack, *, transposed: bool = False, interpret: Any = None
) -> Float[Array, "T O"]:
    """The product of rows with the running layer's matrix of a stack, [L, O, I] if transposed, with constants given."""
    layer_1 = jnp.asarray(stack.layer, jnp.int32).reshape(1)
    return _multiply(x, stack.matrices, layer_1, config=config, transposed=transposed, interpret=interpret)


# A program's layers share what is traced and lowered here: seconds for each.
@functools.partial(jax.jit, static_argnames=("config", "transposed", "interpret"))
def _multiply(
    x: Float[Array, "T I"],
    matrices: Float[Array, "L A B"],
    layer_1: Int[Array, " 1"],
    *,
    config: TurnedConfig,
    transposed: bool,
    interpret: Any,
) -> Float[Array, "T O"]:
    T, I = x.shape
    O = matrices.shape[1 if transposed else 2]
    outputs, cluster = 2 * config.tile_out, config.cluster
    num_tiles_out, num_tiles_rows = pl.cdiv(O, outputs * cluster), pl.cdiv(T, config.tile_rows)
    num_items = num_tiles_out * num_tiles_rows * config.split
    sizes = Sizes(
        config,
        num_tiles_out=num_tiles_out,
        num_tiles_rows=num_tiles_rows,
        num_turns=I // config.tile_in // config.split,
        num_clusters=min(num_items, num_clusters(cluster)),
        transposed=transposed,
    )
    dtype = jnp.dtype(jnp.float32) if config.split > 1 else x.dtype
    weights = (outputs, config.tile_in) if transposed else (config.tile_in, outputs)
    rows_written = math.gcd(config.tile_rows, WRITTEN_BYTES // (config.tile_out * dtype.itemsize))
    shared_by = {"collective_axes": ("block",)} if cluster > 1 else {}
    free = functools.partial(plgpu.ClusterBarrier, **shared_by) if cluster > 1 else plgpu.Barrier
    run = plgpu.kernel(
        functools.partial(_multiply_tiles, sizes),
        out_type=jax.ShapeDtypeStruct((config.split, T, O), dtype),
        grid=(sizes.num_clusters,),
        grid_names=("cluster",),
        cluster=(cluster,),
        cluster_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="mosaic_turned_product",
        interpret=interpret,
        scratch_types={
            "w_smem": _swizzled((config.num_stages, *weights), x.dtype),
            "x_smem": _swizzled((config.num_stages, config.tile_rows, config.tile_in), x.dtype),
            "out_smem": _swizzled((2, 2, rows_written, config.tile_out), dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=config.num_stages),
            "free": free(num_arrivals=2, num_barriers=config.num_stages),
        },
    )
    sums_STO = run(x, matrices, layer_1)
    # One by one: whatever reads the product then adds the parts itself.
    return functools.reduce(jnp.add, [sums_STO[s] for s in range(config.split)]).astype(x.dtype)


def num_clusters(cluster: int) -> int:
    """Clusters of so many blocks that run at once: those of four do not fill every group of multiprocessors."""
    return num_multiprocessors() // cluster - (1 if cluster > 2 else 0)


def _swizzled(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory without bank conflicts, as TMA and wgmma know it."""
    tiling = plgpu.TilingTransform((8, SWIZZLE // dtype.itemsize))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(SWIZZLE)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def _multiply_tiles(sizes: Sizes, x_ref, matrices_ref, layer_ref, out_ref, **shared) -> None:
    """Divides the work among the three warpgroups."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        _compute(sizes, warpgroup, out_ref, **shared)

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        _load(sizes, x_ref, matrices_ref.at[layer_ref[0]], **shared)


def _place(sizes: Sizes, n: jax.Array) -> tuple[Any, Any, Any]:
    """Gives the first row, the first output and the part of this block's item n.

    Tiles of the same outputs follow each other, so that neighbouring clusters read the same weights.
    """
    number = n * sizes.num_clusters + lax.axis_index("cluster")
    tile_rows, rest = lax.rem(number, sizes.num_tiles_rows), lax.div(number, sizes.num_tiles_rows)
    tile_out, part = lax.rem(rest, sizes.num_tiles_out), lax.div(rest, sizes.num_tiles_out)
    output = (tile_out * sizes.config.cluster + lax.axis_index("block")) * sizes.outputs
    return tile_rows * sizes.config.tile_rows, output, part


def _num_own_items(sizes: Sizes) -> jax.Array:
    most = sizes.num_items - 1 - lax.axis_index("cluster")
    return lax.div(most, jnp.int32(sizes.num_clusters)) + 1


def _load(sizes: Sizes, x_ref, w_ref, *, w_smem, x_smem, out_smem, full, free) -> None:
    """Copies the weights and the rows of every turn of every item, as buffers become free."""
    config = sizes.config

    def load_turn(use, _):
        slot = lax.rem(use, jnp.int32(config.num_stages))
        n, turn = lax.div(use, jnp.int32(sizes.num_turns)), lax.rem(use, jnp.int32(sizes.num_turns))
        row, output, part = _place(sizes, n)
        inputs = pl.ds((part * sizes.num_turns + turn) * config.tile_in, config.tile_in)
        outputs, rows = pl.ds(output, sizes.outputs), pl.ds(row, config.tile_rows)
        pl.when(use >= config.num_stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
        weights = w_ref.at[outputs, inputs] if sizes.transposed else w_ref.at[inputs, outputs]
        plgpu.copy_gmem_to_smem(weights, w_smem.at[slot], full.at[slot])
        axes = "block" if config.cluster > 1 else None
        plgpu.copy_gmem_to_smem(x_ref.at[rows, inputs], x_smem.at[slot], full.at[slot], collective_axes=axes)

    def drain(use, _):
        plgpu.barrier_wait(free.at[lax.rem(use, jnp.int32(config.num_stages))])

    uses = _num_own_items(sizes) * sizes.num_turns
    lax.fori_loop(jnp.int32(0), uses, load_turn, None)
    lax.fori_loop(jnp.maximum(uses - config.num_stages, 0), uses, drain, None)


def _compute(sizes: Sizes, warpgroup, out_ref, *, w_smem, x_smem, out_smem, full, free) -> None:
    """Multiplies this warpgroup's half of the outputs, and writes each item's sums."""
    config = sizes.config
    own = pl.ds(warpgroup * config.tile_out, config.tile_out)

    def compute_item(n, _):
        first = n * sizes.num_turns

        def multiply_turns(acc_ref):
            def multiply_turn(turn, _):
                use = first + turn
                slot = lax.rem(use, jnp.int32(config.num_stages))
                plgpu.barrier_wait(full.at[slot])
                w_smem_OI = w_smem.at[slot, own] if sizes.transposed else w_smem.at[slot, :, own].transpose((1, 0))
                plgpu.wgmma(acc_ref, w_smem_OI, x_smem.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(1)  # the turn before is done
                before = lax.rem(use + (config.num_stages - 1), jnp.int32(config.num_stages))
                pl.when(turn > 0)(functools.partial(plgpu.barrier_arrive, free.at[before]))

            lax.fori_loop(jnp.int32(0), jnp.int32(sizes.num_turns), multiply_turn, None)
            return acc_ref[...]

        acc_OT = pl.run_scoped(
            multiply_turns, plgpu.WGMMAAccumulatorRef((config.tile_out, config.tile_rows), jnp.float32)
        )
        last = first + (sizes.num_turns - 1)
        plgpu.barrier_arrive(free.at[lax.rem(last, jnp.int32(config.num_stages))])
        _write(sizes, n, warpgroup, acc_OT, out_ref, out_smem.at[warpgroup])

    lax.fori_loop(jnp.int32(0), _num_own_items(sizes), compute_item, None)
    plgpu.wait_smem_to_gmem(0)


def _write(sizes: Sizes, n, warpgroup, acc_OT, out_ref, out_smem) -> None:
    """Writes a warpgroup's sums a few rows at a time, two copies on their way at once."""
    row, output, part = _place(sizes, n)
    num_rows = out_smem.shape[1]
    outputs = pl.ds(output + warpgroup * sizes.config.tile_out, sizes.config.tile_out)
    for i in range(sizes.config.tile_rows // num_rows):
        buffer = out_smem.at[i % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        part_OT = acc_OT[:, i * num_rows : (i + 1) * num_rows].astype(out_ref.dtype)
        buffer.transpose((1, 0))[...] = plgpu.layout_cast(part_OT, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, out_ref.at[part, pl.ds(row + i * num_rows, num_rows), outputs])
