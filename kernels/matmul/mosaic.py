"""The product of many rows with one layer's matrix on Hopper: jax's own Mosaic kernel, which finds the layer in place.

Knows the matrices of all layers as one array, and the number of the layer. Refuses to know when it is worth it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu import MatmulDimension, TuningConfig, get_num_sms, kernel
from jaxtyping import Array, Float, Int

from jaxllm.kernels.matmul.choice import MosaicConfig, Stack


def multiply(
    config: MosaicConfig, x: Float[Array, "T I"], stack: Stack, *, transposed: bool = False
) -> Float[Array, "T O"]:
    """The product of rows with the running layer's matrix of a stack, with constants given; sizes are whole tiles.

    Raises:
        ValueError: a transposed matrix, or sizes that are not whole tiles.
    """
    if transposed:
        raise ValueError("the Mosaic product takes no transposed matrix")
    return _multiply(x, stack.matrices, jnp.asarray(stack.layer, jnp.int32).reshape(1), config=config)


# Lowered once for all layers of a program: it takes a second or two.
@functools.partial(jax.jit, static_argnames="config")
def _multiply(
    x: Float[Array, "T I"], matrices: Float[Array, "L I O"], layer: Int[Array, " 1"], config: MosaicConfig
) -> Float[Array, "T O"]:
    tuning = TuningConfig(
        tile_m=config.tile_rows,
        tile_n=config.tile_out,
        tile_k=config.tile_in,
        max_concurrent_steps=config.num_stages,
        grid_minor_dim=MatmulDimension.M if config.rows_first else MatmulDimension.N,
        grid_tile_width=config.tiles_in_a_row,
        wg_dimension=MatmulDimension.N if config.side_by_side else MatmulDimension.M,
    )

    def multiply_layer(x_gmem, stack_gmem, layer_gmem, out_gmem):
        kernel(x_gmem, stack_gmem.at[layer_gmem[0]], None, out_gmem, tuning)

    multiply_all = plgpu.kernel(
        multiply_layer,
        out_type=jax.ShapeDtypeStruct((x.shape[0], matrices.shape[2]), x.dtype),
        grid=(get_num_sms(),),
        grid_names=("cluster_grid",),
        cluster=(1,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return multiply_all(x, matrices, layer)
