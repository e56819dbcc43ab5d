"""The Triton versions that write the cache, against their references: in Triton's interpreter, and on a GPU."""

import contextlib
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.kv_write.reference import kv_write
from jaxllm.kernels.launch import poisoned_results
from jaxllm.kernels.rope_kv_write.reference import rope_kv_write

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

L, P, C = 3, 9, 8


def fast(operation):
    return getattr(importlib.import_module(f"jaxllm.kernels.{operation}.triton"), operation)


def draw_slots(rng, num_tokens, num_padding):
    """A different slot for each token, and slot 0 of block 0 for the padding behind them."""
    slot = C + rng.permutation((P - 1) * C)[:num_tokens]
    slot = jnp.asarray(np.concatenate([slot, np.zeros(num_padding, int)]), jnp.int32)
    return slot // C, slot % C


def normal(rng, shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("num_tokens", "K", "H"), [(1, 1, 64), (5, 2, 128), (37, 3, 80)])
def test_kv_write_stores_what_the_reference_stores(num_tokens, K, H, dtype):
    rng = np.random.default_rng(num_tokens)
    cache = normal(rng, (L, P, 2, K, C, H), dtype)
    key, value = normal(rng, (num_tokens + 3, K, H), dtype), normal(rng, (num_tokens + 3, K, H), dtype)
    block, offset = draw_slots(rng, num_tokens, 3)
    for layer in (0, 2, jnp.int32(1)):
        expected = np.asarray(kv_write(cache, layer, key, value, block, offset))
        out = np.asarray(jax.jit(fast("kv_write"))(cache, layer, key, value, block, offset))
        np.testing.assert_array_equal(out[:, 1:], expected[:, 1:])


CASES = {
    "llama": {"K": 2, "G": 4, "H": 64, "R": 32},
    "qwen2_bias": {"K": 2, "G": 7, "H": 128, "R": 64, "bias": True},
    "qwen3_norms": {"K": 4, "G": 2, "H": 128, "R": 64, "norms": True},
    "gemma_norms_of_256": {"K": 1, "G": 4, "H": 256, "R": 128, "norms": True, "norm_offset": 1.0},
    "partial": {"K": 2, "G": 1, "H": 96, "R": 24, "bias": True, "norms": True},
    "odd": {"K": 3, "G": 1, "H": 80, "R": 40},
    "no_rope": {"K": 1, "G": 8, "H": 64, "R": 0, "bias": True},
}


# Poisoned results are operands updated in place, so the launch is another one: as the engine launches it counts too.
@pytest.mark.parametrize("poisoned", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_rope_kv_write_gives_what_the_reference_gives(name, dtype, poisoned):
    case = CASES[name]
    K, G, H, R = (case[key] for key in "KGHR")
    rng = np.random.default_rng(H + R)
    num_tokens = 21
    cache = normal(rng, (L, P, 2, K, C, H), dtype)
    qkv = normal(rng, (num_tokens + 2, K, G + 2, H), dtype)
    angle = rng.uniform(0, 100, size=(num_tokens + 2, R))
    cos, sin = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
    block, offset = draw_slots(rng, num_tokens, 2)
    options = {"eps": 1e-6, "norm_offset": case.get("norm_offset", 0.0)}
    if case.get("bias"):
        options["bias"] = normal(rng, (K, G + 2, H), dtype)
    if case.get("norms"):
        options |= {"q_norm": normal(rng, (H,), dtype), "k_norm": normal(rng, (H,), dtype)}
    arguments = (cache, jnp.int32(1), qkv, cos, sin, block, offset)

    def run(*arguments):
        with poisoned_results() if poisoned else contextlib.nullcontext():
            return fast("rope_kv_write")(*arguments, **options)

    expected_query, expected_cache = rope_kv_write(*arguments, **options)
    query, out = jax.jit(run)(*arguments)
    assert query.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 0.05
    for found, expected in ((query, expected_query), (out[:, 1:], expected_cache[:, 1:])):
        found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_rope_kv_write_finds_bias_and_norms_among_those_of_all_layers():
    rng, (K, G, H) = np.random.default_rng(3), (2, 3, 64)
    arguments = (normal(rng, (L, P, 2, K, C, H)), 1, normal(rng, (5, K, G + 2, H)))
    arguments += (normal(rng, (5, 32)), normal(rng, (5, 32)), *draw_slots(rng, 5, 0))
    params = {"bias": (K, G + 2, H), "q_norm": (H,), "k_norm": (H,)}
    own = {name: normal(rng, shape) for name, shape in params.items()}
    stacked = {name: jnp.full((4, *own[name].shape), jnp.nan).at[2].set(own[name]) for name in params}
    query, cache = fast("rope_kv_write")(*arguments, **own, eps=1e-6)
    for layer in (2, jnp.int32(2)):
        again, cache_again = fast("rope_kv_write")(*arguments, **stacked, param_layer=layer, eps=1e-6)
        np.testing.assert_array_equal(again, query)
        np.testing.assert_array_equal(cache_again[:, 1:], cache[:, 1:])


@pytest.mark.gpu
@pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="compared in bfloat16, which the interpreter rounds otherwise"
)
@pytest.mark.parametrize("name", CASES)
def test_rope_kv_write_in_bfloat16_is_within_the_references_own_rounding(name):
    case = CASES[name]
    K, G, H, R = (case[key] for key in "KGHR")
    rng = np.random.default_rng(H - R)
    qkv, angle = normal(rng, (500, K, G + 2, H)), rng.uniform(0, 100, size=(500, R))
    cos, sin = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
    options = {"bias": normal(rng, (K, G + 2, H))} if case.get("bias") else {}
    if case.get("norms"):
        options |= {"q_norm": normal(rng, (H,)), "k_norm": normal(rng, (H,))}
    slot = jnp.arange(500) + 8

    def run(version, dtype):
        given = {key: value.astype(dtype) for key, value in options.items()}
        cache = jnp.zeros((1, 64, 2, K, 8, H), dtype)
        written = jax.jit(version, static_argnames=("eps", "norm_offset"))(
            cache, 0, qkv.astype(dtype), cos, sin, slot // 8, slot % 8,
            **given, eps=1e-6, norm_offset=case.get("norm_offset", 0.0),
        )  # fmt: skip
        return np.concatenate([np.asarray(array, np.float64).ravel() for array in written])

    exact = run(rope_kv_write, jnp.float32)
    own_error = np.linalg.norm(run(rope_kv_write, jnp.bfloat16) - exact)
    assert np.linalg.norm(run(fast("rope_kv_write"), jnp.bfloat16) - exact) <= 1.5 * own_error


def test_a_donated_cache_is_updated_in_place():
    cache = jnp.zeros((L, P, 2, 1, C, 64), jnp.float16)
    write = jax.jit(fast("kv_write"), donate_argnums=0)
    key = jnp.ones((2, 1, 64), jnp.float16)
    compiled = write.lower(cache, 0, key, key, jnp.array([1, 2]), jnp.array([0, 5])).compile()
    if jax.default_backend() == "gpu":
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < cache.nbytes
        assert memory.alias_size_in_bytes >= cache.nbytes
    out = compiled(cache, 0, key, key, jnp.array([1, 2]), jnp.array([0, 5]))
    assert cache.is_deleted()
    assert float(out.sum()) == 2 * 2 * 64
