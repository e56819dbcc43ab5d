"""Cases of paged attention: decoding as a share of copy bandwidth, prefill as one of the matmul peak."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bench.ceilings import Ceilings
from jaxllm.kernels.e4m3.reference import E4M3, narrow
from jaxllm.kernels.launch import capability
from jaxllm.kernels.paged_attention import mosaic
from jaxllm.kernels.paged_attention.mosaic_prefill import MosaicConfig, choose_config
from jaxllm.kernels.paged_attention.triton import attend
from jaxllm.kernels.paged_attention.tuning import DecodeConfig, PrefillConfig, decode_config, prefill_config

from .shapes import DTYPE, H, K, N
from .timing import Runs, unique

SCALE = H**-0.5


@dataclass(frozen=True, slots=True)
class Case:
    """A batch: request b brings new[b] tokens, the last of its context[b]. `calls` run in one program."""

    name: str
    new: tuple[int, ...]
    context: tuple[int, ...]
    block_size: int
    calls: int
    cache_dtype: jnp.dtype = DTYPE

    @property
    def is_decode(self) -> bool:
        return set(self.new) == {1}

    @property
    def num_bytes(self) -> int:
        """Keys and values that have to be read."""
        return sum(self.context) * 2 * K * H * self.cache_dtype.itemsize

    @property
    def num_flops(self) -> int:
        """Of the two products over the pairs of token and key that causality allows."""
        pairs = sum(n * c - n * (n - 1) // 2 for n, c in zip(self.new, self.context, strict=True))
        return 4 * pairs * N * H


def attention_cases(shrink: int) -> list[Case]:
    def even(count: int, length: int) -> tuple[int, ...]:
        return (max(1, length // shrink),) * max(1, count // shrink)

    def decode(name: str, context: tuple[int, ...], calls: int, cache_dtype: jnp.dtype = DTYPE) -> Case:
        return Case(name, (1,) * len(context), context, 16, calls, cache_dtype)

    cases = [
        decode("decode 256x1024", even(256, 1024), 12),
        decode("decode 32x8192", even(32, 8192), 12),
        decode("decode 255x256 + 1x60000", (*even(255, 256), 60_000 // shrink), 16),
        decode("decode 1x8192", even(1, 8192), 48),
        decode("decode 256x400", even(256, 400), 24),
        decode("decode 8x256", even(8, 256), 48),
        decode("decode 1x256", even(1, 256), 48),
        decode("decode fp8 256x1024", even(256, 1024), 24, E4M3),
        decode("decode fp8 32x8192", even(32, 8192), 24, E4M3),
        Case("prefill fp8 1x8192, block 16", even(1, 8192), even(1, 8192), 16, 6, E4M3),
    ]
    for block_size in (64, 16):
        for name, new, context in (
            ("1x8192", even(1, 8192), even(1, 8192)),
            ("8x1024", even(8, 1024), even(8, 1024)),
            ("64x128 on 2000", even(64, 128), tuple(n + 2000 // shrink for n in even(64, 128))),
        ):
            cases.append(Case(f"prefill {name}, block {block_size}", new, context, block_size, 6))
    cases.append(Case("prefill 1x8192, block 128", even(1, 8192), even(1, 8192), 128, 6))
    # The smallest batch that takes the kernel for large prefill.
    cases.append(Case("prefill 1x256 on 3840, block 16", even(1, 256), even(1, 4096), 16, 12))
    return cases


def attention_runs(case: Case) -> Runs:
    few, many = decode_config(H, DTYPE, case.cache_dtype, len(case.new)), prefill_config(H, DTYPE, case.cache_dtype)
    configs: list[DecodeConfig | PrefillConfig | MosaicConfig]
    num_defaults = 1
    if case.is_decode:
        tiles = [
            (16, 2, 6),
            (64, 4, 2),
            (16, 1, 6),
            (64, 4, 4),
            (32, 2, 4),
            (32, 4, 4),
            (64, 2, 4),
            (128, 4, 2),
            (32, 2, 6),
            (64, 8, 2),
            (128, 8, 2),
        ]
        splits = [(64, 128), (64, 256), (64, 512), (128, 512), (256, 512), (64, 1024), (256, 1024)]
        if case.cache_dtype == E4M3:
            tiles = [(32, 2, 4), (32, 2, 6), (64, 2, 4), (64, 4, 4), (32, 1, 5), (32, 4, 5), (64, 2, 3), (16, 1, 6)]
        configs = [few]
        limits = (few.max_registers, None, 80)
        configs += [DecodeConfig(*tile, few.min_chunk, few.num_programs, most) for most in limits for tile in tiles]
        configs += [DecodeConfig(*tile, *split) for split in splits for tile in tiles[:4]]
    else:
        tiles = [(128, 128, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3), (64, 128, 4, 3)]
        tiles += [(128, 32, 8, 4), (256, 64, 8, 3), (64, 64, 4, 4), (64, 128, 8, 3), (128, 64, 8, 2), (64, 32, 4, 4)]
        configs = [many, *(PrefillConfig(*tile) for tile in tiles)]
        if capability() == 90 and case.cache_dtype == DTYPE:  # the Mosaic version is for Hopper and 16 bits alone
            configs = [choose_config(H), many, MosaicConfig(64, 4), MosaicConfig(64, 3), *configs]
            num_defaults = 2

    def program(config):
        constants = (config, many) if isinstance(config, DecodeConfig) else (few, config)
        attend_with = functools.partial(attend, *constants)
        if isinstance(config, MosaicConfig):
            attend_with = functools.partial(mosaic.attend, config)

        def run(query, kv_cache, table, start, length):
            # Each call's queries are the last one's result: none can begin before the other ends.
            for layer in range(case.calls):
                query = attend_with(query, kv_cache, layer, table, start, length, SCALE)
            return query

        return run

    def cost(ceilings: Ceilings) -> tuple[float, float, str]:
        if case.is_decode:
            return case.num_bytes, ceilings.copy, "TB/s"
        return case.num_flops, ceilings.matmul, "TFLOP/s"

    make = functools.partial(attention_inputs, case)
    return Runs(
        case.name, unique(configs), make, program, case.calls, cost, num_defaults=num_defaults, version_of=version_of
    )


def version_of(config: Any) -> str:
    return "mosaic" if isinstance(config, MosaicConfig) else "triton"


def attention_inputs(case: Case) -> tuple[jax.Array, ...]:
    """Random tensors on the device; the blocks of all requests are scattered over the pool."""
    rng = np.random.default_rng(0)
    per_request = [-(-length // case.block_size) for length in case.context]
    blocks = rng.permutation(np.arange(1, sum(per_request) + 1))
    table = np.zeros((len(case.context), max(per_request)), np.int32)
    ends = np.cumsum(per_request)
    for b, (end, count) in enumerate(zip(ends, per_request, strict=True)):
        table[b, :count] = blocks[end - count : end]
    shape = (case.calls, sum(per_request) + 1, 2, K, case.block_size, H)
    query = jax.jit(lambda key: jax.random.normal(key, (sum(case.new), N, H), DTYPE))(jax.random.key(1))
    fill = jax.jit(lambda key: narrow(jax.random.normal(key, shape[1:], DTYPE), case.cache_dtype))
    kv_cache = jnp.stack([fill(key) for key in jax.random.split(jax.random.key(2), case.calls)])
    start = np.concatenate([[0], np.cumsum(case.new)])
    return (
        query,
        kv_cache,
        jnp.asarray(table),
        jnp.asarray(start, jnp.int32),
        jnp.asarray(case.context, jnp.int32),
    )
