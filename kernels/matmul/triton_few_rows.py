"""The product of few rows with one layer's matrix, in Triton, for any card: the weights are read once, and in place.

Knows the matrices of all layers as one array, and the number of the layer. Refuses to know when it is worth it.

With few rows a product costs what reading the weights costs, so there must be enough programs to keep the memory busy:
a program takes TILE_OUT columns and one of SPLIT parts of the inputs. The parts' float32 sums are added by XLA, in a
fixed order and mostly inside of whatever reads the product; there are no atomics, and results repeat bit by bit.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float

from jaxllm.kernels.launch import launch
from jaxllm.kernels.matmul.choice import FewRowsConfig, Stack

MIN_ROWS = 16  # of a matrix product on tensor cores


@triton.jit
def multiply_few_rows(
    x,
    weight,
    layer,
    T,
    out,
    I: tl.constexpr,
    O: tl.constexpr,
    PART: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_IN: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ON_TENSOR_CORES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Columns of program_id % tiles, summed over inputs PART * (program_id // tiles) and on, PART of them.

    Neighbouring programs read neighbouring columns of the same rows of the weights, at about the same time.
    """
    TILES: tl.constexpr = (O + TILE_OUT - 1) // TILE_OUT
    IS_EVEN: tl.constexpr = I % PART == 0 and O % TILE_OUT == 0  # a part is whole tiles
    part = tl.program_id(0) // TILES
    o_O = tl.program_id(0) % TILES * TILE_OUT + tl.arange(0, TILE_OUT)
    i_I = part * PART + tl.arange(0, TILE_IN)
    t_T = tl.arange(0, TILE_ROWS)
    base = weight + tl.load(layer).to(tl.int64) * I * O
    if TRANSPOSED:
        w_IO = base + o_O[None, :].to(tl.int64) * I + i_I[:, None]
    else:
        w_IO = base + i_I[:, None].to(tl.int64) * O + o_O[None, :]
    if ON_TENSOR_CORES:
        x_TI = x + t_T[:, None] * I + i_I[None, :]
        acc_TO = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
        for start in range(0, PART, TILE_IN):
            if IS_EVEN:
                w = tl.load(w_IO, eviction_policy="evict_first")
                rows = tl.load(x_TI, mask=t_T[:, None] < T, other=0.0)
            else:
                is_in_I = i_I + start < I
                mask_IO = is_in_I[:, None] & (o_O < O)[None, :]
                w = tl.load(w_IO, mask=mask_IO, other=0.0, eviction_policy="evict_first")
                rows = tl.load(x_TI, mask=(t_T[:, None] < T) & is_in_I[None, :], other=0.0)
            acc_TO = tl.dot(rows, w, acc_TO, input_precision=PRECISION)
            x_TI += TILE_IN
            w_IO += TILE_IN if TRANSPOSED else TILE_IN * O
        to_TO = out + (part * T + t_T)[:, None].to(tl.int64) * O + o_O[None, :]
        tl.store(to_TO, acc_TO.to(out.dtype.element_ty), mask=(t_T < T)[:, None] & (o_O < O)[None, :])
    else:  # one row, without the way through shared memory
        acc_IO = tl.zeros([TILE_IN, TILE_OUT], tl.float32)
        for start in range(0, PART, TILE_IN):
            if IS_EVEN:
                w = tl.load(w_IO, eviction_policy="evict_first")
                x_I = tl.load(x + i_I + start)
            else:
                is_in_I = i_I + start < I
                mask_IO = is_in_I[:, None] & (o_O < O)[None, :]
                w = tl.load(w_IO, mask=mask_IO, other=0.0, eviction_policy="evict_first")
                x_I = tl.load(x + i_I + start, mask=is_in_I, other=0.0)
            acc_IO += w.to(tl.float32) * x_I.to(tl.float32)[:, None]
            w_IO += TILE_IN if TRANSPOSED else TILE_IN * O
        sum_O = tl.sum(acc_IO, 0)
        tl.store(out + part.to(tl.int64) * O + o_O, sum_O.to(out.dtype.element_ty), mask=o_O < O)


def multiply(
    config: FewRowsConfig,
    x: Float[Array, "T I"],
    stack: Stack,
    *,
    transposed: bool = False,
) -> Float[Array, "T O"]:
    """The product of rows with the running layer's matrix of a stack, [L, O, I] if transposed, with constants given."""
    T, I = x.shape
    O = stack.matrices.shape[1 if transposed else 2]
    on_tensor_cores = config.on_tensor_cores or T > 1
    part = triton.cdiv(triton.cdiv(I, config.split), config.tile_in) * config.tile_in
    split = triton.cdiv(I, part)
    (sums_STO,) = launch(
        multiply_few_rows,
        x,
        stack.matrices,
        jnp.asarray(stack.layer, jnp.int32).reshape(1),
        T,
        results=(jax.ShapeDtypeStruct((split, T, O), jnp.float32 if split > 1 else x.dtype),),
        grid=triton.cdiv(O, config.tile_out) * split,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        I=I,
        O=O,
        PART=part,
        TILE_ROWS=max(MIN_ROWS, triton.next_power_of_2(T)),
        TILE_IN=config.tile_in,
        TILE_OUT=config.tile_out,
        TRANSPOSED=transposed,
        ON_TENSOR_CORES=on_tensor_cores,
        PRECISION="ieee" if x.dtype == jnp.float32 else None,
    )
    return sums_STO[0] if split == 1 else sums_STO.sum(0).astype(x.dtype)
