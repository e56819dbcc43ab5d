"""The case of rope and KV write, as a share of copy bandwidth."""

import jax
import jax.numpy as jnp

from jaxllm.kernels.rope_kv_write.triton import RopeConfig, turn_and_write

from .shapes import DTYPE, H, K, N
from .timing import Runs, unique


def rope_runs(num_tokens: int) -> Runs:
    layers, block_size, projections = 12, 16, 4
    configs = [RopeConfig(), *(RopeConfig(*c) for c in ((8, 4), (16, 4), (32, 4), (32, 8), (64, 8), (16, 2), (8, 2)))]

    def make() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(3), 3)
        shape = (projections, num_tokens, K, N // K + 2, H)
        qkv = jax.jit(lambda key: jax.random.normal(key, shape, DTYPE))(keys[0])
        angle = jax.random.uniform(keys[1], (num_tokens, H // 2)) * 100
        slot = jax.random.permutation(keys[2], num_tokens).astype(jnp.int32) + block_size
        num_blocks = num_tokens // block_size + 2
        kv_cache = jnp.zeros((layers, num_blocks, 2, K, block_size, H), DTYPE)
        return kv_cache, *qkv, jnp.cos(angle), jnp.sin(angle), slot // block_size, slot % block_size

    def program(config: RopeConfig):
        def run(kv_cache, *rest):
            *qkv, cos, sin, block, offset = rest
            queries = []
            for layer in range(layers):
                query, kv_cache = turn_and_write(
                    config, kv_cache, layer, qkv[layer % projections], cos, sin, block, offset
                )
                queries.append(query)
            return kv_cache, jnp.stack([query[-1] for query in queries])

        return run

    rows, half = num_tokens * K * (N // K + 2) * H, num_tokens * H // 2
    num_bytes = 2 * rows * 2 + 2 * half * 4
    return Runs(
        f"rope + KV write, {num_tokens} tokens",
        unique(configs),
        make,
        program,
        layers,
        lambda ceilings: (num_bytes, ceilings.copy, "TB/s"),
        donates=True,
    )
