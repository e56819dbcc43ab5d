"""Products of up to 16 rows with one layer's matrix, with the norm before and what follows, in one Triton kernel each.

Knows the matrices of all layers as one array, and the number of the layer. Refuses to know when it is worth it.

A program sums some outputs over all inputs, so that nothing has to be added up between programs, and results repeat bit
by bit. All programs run at once, each with as many weights on their way as the memory needs to be kept busy. A norm is
folded into the product: rows are scaled on their way in, their squares summed up, and the sums divided by the root.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from jaxllm.kernels.all_reduce.inbox import CHUNK, most_words, ranks_of
from jaxllm.kernels.all_reduce.triton import address, begin_exchange, exchanged
from jaxllm.kernels.fused_linear.choice import FusedConfig, NormStack
from jaxllm.kernels.launch import launch
from jaxllm.kernels.matmul.choice import Stack

MIN_ROWS = 16  # of a matrix product on tensor cores


@triton.jit
def multiply_fused(
    x,
    scale,
    weight,
    residual,
    peers,
    layer,
    T,
    out,
    I: tl.constexpr,
    O: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_IN: tl.constexpr,
    TILE_OUT: tl.constexpr,
    ON_TENSOR_CORES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_WORDS: tl.constexpr,
):
    """Outputs TILE_OUT * program_id and on. With an activation a row of weights is O gates, then as many ups."""
    W: tl.constexpr = O if ACTIVATION is None else 2 * O
    l = tl.load(layer).to(tl.int64)
    o_O = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    t_T = tl.arange(0, TILE_ROWS)
    mask_TO = (t_T < T)[:, None] & (o_O < O)[None, :]
    at_TO = t_T[:, None] * O + o_O[None, :]
    weight += l * I * W
    scale += l * I
    if RANKS > 1:  # what the end needs is asked for at the beginning
        own = address(peers + 2)
        number, this = begin_exchange(own, tl.program_id(0))
    if HAS_RESIDUAL:
        residual_TO = tl.load(residual + at_TO, mask=mask_TO, other=0.0)
    if ON_TENSOR_CORES:
        sum_TO, up_TO, squares_T = on_tensor_cores(
            x,
            scale,
            weight,
            o_O,
            t_T,
            T,
            I,
            O,
            W,
            TILE_IN,
            TILE_OUT,
            HAS_NORM,
            NORM_OFFSET,
            ACTIVATION,
            TILE_ROWS,
            PRECISION,
        )
    else:
        sum_TO, up_TO, squares_T = one_row(
            x, scale, weight, o_O, I, O, W, TILE_IN, TILE_OUT, HAS_NORM, NORM_OFFSET, ACTIVATION, STAGES
        )
    if HAS_NORM:
        factor_T1 = tl.rsqrt(squares_T / I + EPS)[:, None]
        sum_TO *= factor_T1
        up_TO *= factor_T1
    if ACTIVATION is not None:
        sum_TO = activated(sum_TO, ACTIVATION) * up_TO
    if RANKS > 1:  # a tile's numbers are the first of the program's chunk
        word_TO = tl.program_id(0) * CHUNK + t_T[:, None] * TILE_OUT + tl.arange(0, TILE_OUT)[None, :]
        sum_TO = exchanged(sum_TO, word_TO, peers, own, this, RANKS, CHUNK, MOST_WORDS)
        tl.store(number, this)
    if HAS_RESIDUAL:
        sum_TO += residual_TO.to(tl.float32)
    tl.store(out + at_TO, sum_TO.to(out.dtype.element_ty), mask=mask_TO)


@triton.jit
def on_tensor_cores(
    x,
    scale,
    weight,
    o_O,
    t_T,
    T,
    I: tl.constexpr,
    O: tl.constexpr,
    W: tl.constexpr,
    TILE_IN: tl.constexpr,
    TILE_OUT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums of all rows, those of the ups, and the rows' squares."""
    IS_EVEN: tl.constexpr = I % TILE_IN == 0 and O % TILE_OUT == 0
    i_I = tl.arange(0, TILE_IN)
    x_TI = x + t_T[:, None] * I + i_I[None, :]
    w_IO = weight + i_I[:, None] * W + o_O[None, :]
    sum_TO = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    up_TO = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    squares_TI = tl.zeros([TILE_ROWS, TILE_IN], tl.float32)
    for start in range(0, I, TILE_IN):
        is_in_I = i_I < I - start
        mask_IO = is_in_I[:, None] & (o_O < O)[None, :]
        rows_TI = tl.load(x_TI, mask=(t_T < T)[:, None] & is_in_I[None, :], other=0.0)
        if IS_EVEN:
            tile_IO = tl.load(w_IO, eviction_policy="evict_first")
        else:
            tile_IO = tl.load(w_IO, mask=mask_IO, other=0.0, eviction_policy="evict_first")
        if HAS_NORM:
            scale_I = NORM_OFFSET + tl.load(scale + start + i_I, mask=is_in_I, other=0.0).to(tl.float32)
            wide_TI = rows_TI.to(tl.float32)
            squares_TI += wide_TI * wide_TI
            rows_TI = (wide_TI * scale_I[None, :]).to(x.dtype.element_ty)
        sum_TO = tl.dot(rows_TI, tile_IO, sum_TO, input_precision=PRECISION)
        if ACTIVATION is not None:
            if IS_EVEN:
                tile_IO = tl.load(w_IO + O, eviction_policy="evict_first")
            else:
                tile_IO = tl.load(w_IO + O, mask=mask_IO, other=0.0, eviction_policy="evict_first")
            up_TO = tl.dot(rows_TI, tile_IO, up_TO, input_precision=PRECISION)
        x_TI += TILE_IN
        w_IO += TILE_IN * W
    return sum_TO, up_TO, tl.sum(squares_TI, 1)


@triton.jit
def one_row(
    x,
    scale,
    weight,
    o_O,
    I: tl.constexpr,
    O: tl.constexpr,
    W: tl.constexpr,
    TILE_IN: tl.constexpr,
    TILE_OUT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same of a single row, multiplied in registers."""
    IS_EVEN: tl.constexpr = I % TILE_IN == 0 and O % TILE_OUT == 0
    i_I = tl.arange(0, TILE_IN)
    w_IO = weight + i_I[:, None] * W + o_O[None, :]
    sum_IO = tl.zeros([TILE_IN, TILE_OUT], tl.float32)
    up_IO = tl.zeros([TILE_IN, TILE_OUT], tl.float32)
    squares_I = tl.zeros([TILE_IN], tl.float32)
    for start in tl.range(0, I, TILE_IN, num_stages=STAGES):
        is_in_I = i_I < I - start
        mask_IO = is_in_I[:, None] & (o_O < O)[None, :]
        if IS_EVEN:
            tile_IO = tl.load(w_IO, eviction_policy="evict_first")
        else:
            tile_IO = tl.load(w_IO, mask=mask_IO, other=0.0, eviction_policy="evict_first")
        if ACTIVATION is not None:
            if IS_EVEN:
                ups_IO = tl.load(w_IO + O, eviction_policy="evict_first")
            else:
                ups_IO = tl.load(w_IO + O, mask=mask_IO, other=0.0, eviction_policy="evict_first")
        row_I = tl.load(x + start + i_I, mask=is_in_I, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares_I += row_I * row_I
            row_I *= NORM_OFFSET + tl.load(scale + start + i_I, mask=is_in_I, other=0.0).to(tl.float32)
        sum_IO += tile_IO.to(tl.float32) * row_I[:, None]
        if ACTIVATION is not None:
            up_IO += ups_IO.to(tl.float32) * row_I[:, None]
        w_IO += TILE_IN * W
    return tl.sum(sum_IO, 0)[None, :], tl.sum(up_IO, 0)[None, :], tl.sum(squares_I[None, :], 1)


@triton.jit
def activated(x_TO, ACTIVATION: tl.constexpr):
    """silu, gelu by tanh, or gelu."""
    if ACTIVATION == "silu":
        share_TO = tl.sigmoid(x_TO)
    elif ACTIVATION == "gelu_tanh":
        share_TO = tl.sigmoid(1.5957691216057308 * (x_TO + 0.044715 * x_TO * x_TO * x_TO))  # 2 sqrt(2 / pi)
    else:
        tl.static_assert(ACTIVATION == "gelu")
        share_TO = 0.5 * (1.0 + tl.erf(x_TO * 0.7071067811865476))
    return x_TO * share_TO


def norm_linear(
    config: FusedConfig, x: Float[Array, "T I"], norm_stack: NormStack, stack: Stack, *, eps: float, offset: float = 0.0
) -> Float[Array, "T O"]:
    """The product of the normed rows with the running layer's matrix, with constants given."""
    return multiply(config, x, stack, norm_stack.scales, eps=eps, offset=offset)


def norm_gated_linear(
    config: FusedConfig,
    x: Float[Array, "T I"],
    norm_stack: NormStack,
    stack: Stack,
    *,
    activation: str,
    eps: float,
    offset: float = 0.0,
) -> Float[Array, "T F"]:
    """The gated product of the normed rows, with constants given."""
    return multiply(config, x, stack, norm_stack.scales, eps=eps, offset=offset, activation=activation)


def linear_add(
    config: FusedConfig, x: Float[Array, "T I"], stack: Stack, residual: Float[Array, "T O"] | None
) -> Float[Array, "T O"]:
    """The residual, if any, and the product with the running layer's matrix, with constants given."""
    return multiply(config, x, stack, residual=residual)


def linear_all_reduce(
    config: FusedConfig,
    x: Float[Array, "T I"],
    stack: Stack,
    residual: Float[Array, "T O"] | None,
    peers: Int[Array, " W"],
) -> Float[Array, "T O"]:
    """The residual, if any, and the sum over the ranks of such products; `peers` as for all_reduce."""
    return multiply(config, x, stack, residual=residual, peers=peers)


def multiply(
    config: FusedConfig,
    x: Float[Array, "T I"],
    stack: Stack,
    scales: Float[Array, "L I"] | None = None,
    residual: Float[Array, "T O"] | None = None,
    peers: Int[Array, " W"] | None = None,
    *,
    eps: float = 0.0,
    offset: float = 0.0,
    activation: str | None = None,
) -> Float[Array, "T O"]:
    """What the three have in common: a norm where there are scales, a gate of the activation, a residual."""
    T, I = x.shape
    O = stack.matrices.shape[2] // (1 if activation is None else 2)
    on_tensor_cores = config.on_tensor_cores or T > 1
    num_ranks = 1 if peers is None else ranks_of(peers.shape[0])
    (out_TO,) = launch(
        multiply_fused,
        x,
        x if scales is None else scales,  # what is not there is never read
        stack.matrices,
        x if residual is None else residual,
        x if peers is None else peers,
        _as_operand(stack.layer),
        T,
        results=(jax.ShapeDtypeStruct((T, O), x.dtype),),
        grid=triton.cdiv(O, config.tile_out),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        I=I,
        O=O,
        TILE_ROWS=max(MIN_ROWS, triton.next_power_of_2(T)) if on_tensor_cores else 1,
        TILE_IN=config.tile_in,
        TILE_OUT=config.tile_out,
        ON_TENSOR_CORES=on_tensor_cores,
        HAS_NORM=scales is not None,
        EPS=eps,
        NORM_OFFSET=offset,
        ACTIVATION=activation,
        HAS_RESIDUAL=residual is not None,
        PRECISION="ieee" if x.dtype == jnp.float32 else None,
        STAGES=config.num_stages,
        RANKS=num_ranks,
        CHUNK=CHUNK,
        MOST_WORDS=most_words(num_ranks),
    )
    return out_TO


def _as_operand(layer: int | Int[Array, ""]) -> Int[Array, "1"]:
    return jnp.asarray(layer, jnp.int32).reshape(1)
