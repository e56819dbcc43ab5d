"""Every kernel compiled, down to machine code, for cards of three generations that are not here. Nothing runs."""

import importlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.kernels.all_reduce.inbox import num_peer_words
from jaxllm.kernels.e4m3.reference import E4M3
from jaxllm.kernels.fused_linear.choice import FusedConfig
from jaxllm.kernels.launch import capability, compiling_for, device_kind, num_multiprocessors
from jaxllm.kernels.matmul.choice import FewRowsConfig, MosaicConfig, Stack, TurnedConfig
from jaxllm.kernels.sampling.reference import Edits, Filters, Penalties
from jaxllm.kernels.select import VERSIONS, select

pytestmark = pytest.mark.aot

CARDS = ("a100", "l40s", "h200")
HALF, FULL, INT = jnp.bfloat16, jnp.float32, jnp.int32

type Program = tuple[Callable, Sequence[Any]]


def spec(*shape: int, dtype: Any = INT) -> Any:
    """An argument by its shape; its device is named later."""
    return jax.ShapeDtypeStruct(shape, dtype)


def version(operation: str, name: str) -> Callable:
    """The version of that name, whether or not `select` would take it on this machine."""
    module = next(v.module for v in VERSIONS[operation] if v.name == name)
    return getattr(importlib.import_module(module), operation)


def attention(T, B, N, K, H, C, dtype, cache=None, window=False, softcap=None, sinks=False, name="triton") -> Program:
    """A layer's attention over a table of 64 blocks, with every chunk list as large as an engine's."""
    arrays = [spec(T, N, H, dtype=dtype), spec(2, 99, 2, K, C, H, dtype=cache or dtype), spec(), spec(B, 64)]
    optional = ({"window": spec()} if window else {}) | ({"sinks": spec(N, dtype=HALF)} if sinks else {})
    arrays += [spec(B + 1), spec(B), *optional.values()]

    def run(*arguments):
        options = dict(zip(optional, arguments[6:], strict=True))
        return version("paged_attention", name)(*arguments[:6], scale=H**-0.5, softcap=softcap, **options)

    return run, arrays


def write(K, H, dtype, cache=None) -> Program:
    rows = spec(24, K, H, dtype=dtype)
    arrays = [spec(2, 99, 2, K, 16, H, dtype=cache or dtype), spec(), rows, rows, spec(24), spec(24)]
    return version("kv_write", "triton"), arrays


def rope(K, G, H, R, dtype, cache=None, norms=False) -> Program:
    turn = spec(24, R, dtype=FULL)
    arrays = [spec(2, 99, 2, K, 16, H, dtype=cache or dtype), spec(), spec(24, K, G + 2, H, dtype=dtype), turn, turn]
    arrays += [spec(24), spec(24)]
    if norms:
        arrays += [spec(K, G + 2, H, dtype=dtype), spec(H, dtype=dtype), spec(H, dtype=dtype), spec(2, dtype=FULL)]

    def run(*arguments):
        options = dict(zip(("bias", "q_norm", "k_norm", "kv_scale"), arguments[7:], strict=True)) if norms else {}
        return version("rope_kv_write", "triton")(*arguments[:7], **options)

    return run, arrays


def choosing(V, everything: bool) -> Program:
    B, floats = 8, spec(8, dtype=FULL)
    arrays = [spec(B, V, dtype=FULL), floats, spec(B, 2, dtype=jnp.uint32), spec(B)]
    rules = [
        spec(B, -(-V // 32), dtype=jnp.uint32),
        Edits(spec(16), spec(16), spec(16, dtype=FULL)),
        Penalties(spec(9, V), spec(B), floats, floats, floats),
        Filters(spec(B), floats, floats),
    ]

    def run(*arguments):
        options = dict(zip(("mask", "edits", "penalties", "filters"), arguments[4:], strict=True)) if everything else {}
        return version("choose", "triton")(*arguments[:4], num_best=8 if everything else None, **options)

    return run, arrays + rules * everything


def product(rows, dtype, kernel, config, transposed=False) -> Program:
    module = importlib.import_module(f"jaxllm.kernels.matmul.{kernel}")
    arrays = [spec(rows, 1024, dtype=dtype), spec(2, *((4096, 1024) if transposed else (1024, 4096)), dtype=dtype)]
    return lambda x, w, l: module.multiply(config, x, Stack(w, l), transposed=transposed), [*arrays, spec()]


def fused(rows, dtype, config, is_gated=False) -> Program:
    """A product with its norm, and a gate or a residual."""
    module = importlib.import_module("jaxllm.kernels.fused_linear.triton")
    width, activation = (512, "silu") if is_gated else (1024, None)
    arrays = [spec(rows, 1024, dtype=dtype), spec(2, 1024, 1024, dtype=dtype), spec(2, 1024, dtype=dtype)]

    def run(x, w, scales, residual, l):
        return module.multiply(config, x, Stack(w, l), scales, residual, eps=1e-6, activation=activation)

    return run, [*arrays, spec(rows, width, dtype=dtype), spec()]


def exchanged_product() -> Program:
    def run(x, weights, residual, peers):
        module = importlib.import_module("jaxllm.kernels.fused_linear.triton")
        return module.linear_all_reduce(FusedConfig(512, 32, 8, 1, False), x, Stack(weights, 1), residual, peers)

    arrays = (spec(1, 2048, dtype=HALF), spec(2, 2048, 4096, dtype=HALF), spec(1, 4096, dtype=HALF))
    return run, (*arrays, spec(num_peer_words(2)))


def exchange(dtype: Any, has_residual: bool) -> Program:
    def run(part, residual, peers):
        return version("all_reduce", "triton")(part, residual if has_residual else None, peers=peers)

    return run, (spec(3, 4096, dtype=dtype), spec(3, 4096, dtype=dtype), spec(num_peer_words(2)))


# With sizes that take another way through a kernel: padded heads, blocks smaller and larger than a tile of keys.
PROGRAMS: dict[str, Callable[[], Program]] = {
    "decode of bfloat16": lambda: attention(8, 8, 32, 8, 128, 16, HALF),
    "decode of float16, wide": lambda: attention(8, 8, 8, 4, 256, 128, jnp.float16, window=True, softcap=30.0),
    "decode of bfloat16 with sinks": lambda: attention(8, 8, 64, 8, 64, 16, HALF, sinks=True),
    "decode of float32": lambda: attention(8, 8, 14, 2, 80, 8, FULL, window=True),
    "decode of one request": lambda: attention(1, 1, 32, 8, 128, 16, HALF),
    "decode of one request, e4m3 and wide": lambda: attention(1, 1, 8, 4, 256, 16, HALF, E4M3),
    "decode of many requests, e4m3 and wide": lambda: attention(64, 64, 8, 4, 256, 16, HALF, E4M3),
    "decode of e4m3": lambda: attention(8, 8, 32, 8, 128, 16, HALF, E4M3),
    "decode of e4m3 with sinks": lambda: attention(8, 8, 64, 8, 64, 32, jnp.float16, E4M3, window=True, sinks=True),
    "mixed bfloat16": lambda: attention(64, 4, 32, 8, 128, 16, HALF),
    "mixed float16, wide": lambda: attention(64, 4, 8, 4, 256, 128, jnp.float16, softcap=30.0),
    "mixed float32": lambda: attention(64, 4, 2, 2, 64, 8, FULL),
    "mixed e4m3 with a window and sinks": lambda: attention(64, 4, 14, 2, 64, 16, HALF, E4M3, window=True, sinks=True),
    "kv_write": lambda: write(8, 128, HALF),
    "kv_write of e4m3": lambda: write(3, 80, FULL, E4M3),
    "rope_kv_write": lambda: rope(8, 4, 128, 64, HALF),
    "rope_kv_write of e4m3 with all options": lambda: rope(2, 1, 96, 24, FULL, E4M3, norms=True),
    "choose": lambda: choosing(151_936, everything=False),
    "choose with all rules": lambda: choosing(128_256, everything=True),
    "product of one row": lambda: product(
        1, HALF, "triton_few_rows", FewRowsConfig(tile_in=64, tile_out=128, split=4, on_tensor_cores=False)
    ),
    "product of few rows": lambda: product(48, HALF, "triton_few_rows", FewRowsConfig(split=3), transposed=True),
    "fused product of one row": lambda: fused(1, HALF, FusedConfig(256, 32, 8, 1, False)),
    "fused gated product of few rows": lambda: fused(16, HALF, FusedConfig(), is_gated=True),
    "all-reduce of bfloat16 with a residual": lambda: exchange(HALF, has_residual=True),
    "product of one row over two ranks": exchanged_product,
    "all-reduce of integers": lambda: exchange(INT, has_residual=False),
    "product of few float32 rows": lambda: product(8, FULL, "triton_few_rows", FewRowsConfig(tile_in=32)),
}

HOPPERS: dict[str, Callable[[], Program]] = {
    "mosaic, mixed bfloat16": lambda: attention(256, 4, 32, 8, 128, 16, HALF, name="mosaic"),
    "mosaic, mixed float16 with a window": lambda: attention(
        256, 4, 14, 2, 64, 64, jnp.float16, window=True, softcap=30.0, name="mosaic"
    ),
    "product of many rows": lambda: product(256, HALF, "mosaic", MosaicConfig()),
    "turned product": lambda: product(64, HALF, "mosaic_turned", TurnedConfig(), transposed=True),
}


MOST_SHARED = {"a100": 163, "l40s": 99, "h200": 227}  # KiB of a block


@pytest.fixture
def lower_for(describe_gpu, monkeypatch) -> Callable[[str, Program], jax.stages.Lowered]:
    """Lowers a program for a card. No Triton kernel may want more shared memory than a block of that card can get."""
    triton_call = importlib.import_module("jaxllm.kernels.triton_call")
    compile_kernel = triton_call.compile_kernel

    def lower_for(card: str, program: Program) -> jax.stages.Lowered:
        gpu = describe_gpu(card)

        def checked(*arguments):
            kernel = compile_kernel(*arguments)
            assert kernel.shared_bytes <= MOST_SHARED[card] * 1024, (kernel.name, kernel.shared_bytes, card)
            return kernel

        monkeypatch.setattr(triton_call, "compile_kernel", checked)
        function, arrays = program
        mesh = Mesh(np.array([gpu]), ("x",))
        sharding = NamedSharding(mesh, PartitionSpec())
        placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arrays)
        with compiling_for(gpu), jax.set_mesh(mesh):
            # Jitted anew: a trace for another card must not be taken for it.
            return jax.jit(lambda *arguments: function(*arguments)).lower(*placed)

    return lower_for


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_triton_kernel_compiles_for_every_card(name, lower_for):
    with ThreadPoolExecutor() as pool:
        compiling = {card: pool.submit(compile_quickly, lower_for(card, PROGRAMS[name]())) for card in CARDS}
    for card, text in compiling.items():
        assert "triton_kernel_call" in text.result(), card


@pytest.mark.parametrize("name", HOPPERS)
def test_a_mosaic_kernel_compiles_for_hopper(name, lower_for):
    assert "mosaic_gpu" in compile_quickly(lower_for("h200", HOPPERS[name]()))


def compile_quickly(lowered: jax.stages.Lowered) -> str:
    """Compiles to machine code, what is not the kernel as it comes; gives the program's text."""
    return lowered.compile({"xla_gpu_autotune_level": 0}).as_text() or ""


def test_the_described_card_is_the_one_that_is_asked_about(describe_gpu):
    found = {}
    for card in CARDS:
        with compiling_for(describe_gpu(card)):
            found[card] = (capability(), num_multiprocessors(), device_kind())
    assert found == {
        "a100": (80, 108, "NVIDIA A100-SXM4-80GB"),
        "l40s": (89, 142, "NVIDIA L40S"),
        "h200": (90, 132, "NVIDIA H200"),
    }


@pytest.mark.parametrize("card", CARDS)
def test_what_a_card_cannot_run_is_passed_over_with_one_line(card, describe_gpu, caplog):
    is_hopper = card == "h200"
    with compiling_for(describe_gpu(card)), caplog.at_level(logging.WARNING):
        chosen = {operation: select(operation, platform="gpu").__module__ for operation in VERSIONS}
    assert chosen["paged_attention"] == f"jaxllm.kernels.paged_attention.{'mosaic' if is_hopper else 'triton'}"
    for operation in ("kv_write", "rope_kv_write", "choose"):
        assert chosen[operation].endswith(".triton")
    lines = [record.getMessage() for record in caplog.records]
    number = {"a100": 8.0, "l40s": 8.9}.get(card)
    assert (
        lines == []
        if is_hopper
        else [
            "paged_attention: mosaic cannot be used, the next best will be: "
            f"it needs compute capability 9.0, the GPU has {number}"
        ]
    )
