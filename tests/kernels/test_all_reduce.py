"""Small all-reduces by writing into the others' memory: between processes in Triton's interpreter, and between GPUs."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxllm.engine.peer_memory import can_write_to_peers, make_peer_memory
from jaxllm.kernels.all_reduce.inbox import CHUNK, inbox_words, most_words, num_peer_words, peer_words
from jaxllm.kernels.all_reduce.reference import all_reduce
from jaxllm.kernels.fused_linear import reference, tuned
from jaxllm.kernels.matmul.choice import Stack
from jaxllm.mesh.build import build_mesh
from jaxllm.mesh.peer_access import find_obstacle

SHAPES = ((1, 4096), (3, 700), (2, 1), (64, 32), (1, 1024))
DTYPES = ("bfloat16", "float16", "float32", "int32")

# Each rank is a process; their inboxes are one piece of memory that all have at the same address.
RANKS = """
import ctypes, mmap, os, sys
from jaxllm.kernels.all_reduce.inbox import inbox_words, peer_words

num_ranks, case = eval(sys.argv[1])
size = 4 * inbox_words(num_ranks)
memory = mmap.mmap(-1, num_ranks * size)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
children, rank = [], 0
for other in range(1, num_ranks):
    child = os.fork()
    if not child:
        rank, children = other, []
        break
    children.append(child)

import jax
import jax.numpy as jnp
import numpy as np
from jaxllm.kernels.all_reduce.triton import all_reduce
from jaxllm.kernels.fused_linear.choice import FusedConfig
from jaxllm.kernels.fused_linear.triton import linear_all_reduce
from jaxllm.kernels.matmul.choice import Stack

peers = jnp.asarray(peer_words(rank, [base + r * size for r in range(num_ranks)]))
exec(sys.argv[2])
for child in children:
    _, status = os.waitpid(child, 0)
    assert status == 0, status
"""

# Every exchange is of another size and type, so that the places of one are those of others before it.
SUMS = """
shapes, dtypes = case
for turn, (shape, dtype) in enumerate((shape, dtype) for dtype in dtypes for shape in shapes * 2):
    if shape[0] * shape[1] % 2 and dtype.endswith("16"):
        continue
    rng = np.random.default_rng(turn)
    parts = [jnp.asarray(8 * rng.standard_normal(shape), jnp.float32).astype(dtype) for _ in range(num_ranks)]
    residual = jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype) if turn % 2 else None
    found = all_reduce(parts[rank], residual, peers=peers)
    wide = jnp.float32 if dtype != "int32" else jnp.int32
    total = jnp.zeros(shape, wide)
    for part in parts:
        total = total + part.astype(wide)
    total = total if residual is None else total + residual.astype(wide)
    assert found.dtype == dtype
    found, total = (np.asarray(array.astype(wide)) for array in (found, total.astype(dtype)))
    close = 1 / 128 if dtype == "bfloat16" else 0.0  # which the interpreter rounds otherwise
    np.testing.assert_allclose(found, total, close, close, err_msg=f"{shape} {dtype} rank {rank}")
"""

# Products and plain sums one after the other, since they use the same chunks.
PRODUCTS = """
for turn, (T, I, O, tile_out, on_tensor_cores) in enumerate(case):
    rng = np.random.default_rng(turn)
    x = jnp.asarray(rng.standard_normal((num_ranks, T, I)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((num_ranks, 2, I, O)), jnp.float32)
    residual = jnp.asarray(rng.standard_normal((T, O)), jnp.float32) if turn % 2 else None
    config = FusedConfig(32, tile_out, 4, 1, on_tensor_cores)
    found = linear_all_reduce(config, x[rank], Stack(weight[rank], 1), residual, peers)
    total = jnp.einsum("rti,rio->to", x, weight[:, 1], precision="highest")
    total = total if residual is None else total + residual
    np.testing.assert_allclose(found, total, 1e-4, 1e-4, err_msg=f"{T} {I} {O} rank {rank}")
    twice = all_reduce(found, peers=peers)
    np.testing.assert_allclose(twice, num_ranks * total, 1e-4, 1e-4)
"""
PRODUCT_CASES = ((1, 96, 70, 32, False), (1, 64, 64, 32, True), (5, 64, 96, 32, True), (1, 33, 130, 64, False))


def run_ranks(num_ranks: int, body: str, case: tuple) -> None:
    command = [sys.executable, "-c", RANKS, repr((num_ranks, case)), body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.interpreter
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_are_processes_have_the_same_sums_in_every_type_and_size(num_ranks):
    run_ranks(num_ranks, SUMS, (SHAPES, DTYPES))


@pytest.mark.interpreter
def test_a_product_adds_up_over_the_ranks_by_itself():
    run_ranks(2, PRODUCTS, PRODUCT_CASES)


def test_addresses_come_as_words_the_lower_half_first():
    words = peer_words(1, [0x1_0000_0002, 0xFFFF_FFFF_0000])
    assert words.dtype == np.int32
    assert len(words) == num_peer_words(2)
    assert words.view(np.uint32).tolist() == [1, 0, 0xFFFF_0000, 0xFFFF, 2, 1, 0xFFFF_0000, 0xFFFF]


def test_an_inbox_has_a_number_for_each_chunk_and_two_places_for_each_word_of_each_rank():
    for num_ranks in (2, 4, 8):
        words = most_words(num_ranks)
        assert words % CHUNK == 0
        assert words * (num_ranks - 1) <= most_words(2)
        assert inbox_words(num_ranks) == words // CHUNK + 2 * 2 * num_ranks * words


def test_without_peers_xla_adds_up_and_the_residual_is_added_once():
    parts = jnp.arange(12.0).reshape(2, 6)
    plain, added = jax.vmap(lambda part: (all_reduce(part), all_reduce(part, part * 0 + 100)), axis_name="tensor")(
        parts
    )
    np.testing.assert_array_equal(plain, np.tile(parts.sum(0), (2, 1)))
    np.testing.assert_array_equal(added, np.tile(parts.sum(0) + 100, (2, 1)))


def test_where_there_is_nothing_to_add_up_nobody_is_written_to(caplog):
    caplog.set_level("INFO")
    assert not can_write_to_peers(build_mesh(1, 1, jax.devices()[:1]))
    assert not caplog.messages


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_devices_that_are_no_gpus_are_an_obstacle_of_one_line():
    obstacle = find_obstacle(jax.devices()[:1])
    assert obstacle is not None
    assert "\n" not in obstacle


@pytest.fixture
def gpus():
    """All GPUs as tensor ranks: how many, their mesh, and their inboxes."""
    num_ranks = len(jax.devices())
    if num_ranks < 2:
        pytest.skip(f"it takes two GPUs, found {num_ranks}")
    mesh = build_mesh(1, num_ranks)
    assert can_write_to_peers(mesh)
    return num_ranks, mesh, make_peer_memory(mesh)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpus_have_the_same_sums_at_odd_sizes_and_long_after(gpus, dtype):
    from jaxllm.kernels.all_reduce import triton

    num_ranks, mesh, memory = gpus
    specs = {
        "in_specs": (PartitionSpec("tensor"), PartitionSpec("data", "tensor")),
        "out_specs": PartitionSpec("tensor"),
    }
    for shape in (*SHAPES, (7, 6), (129, 1000), (512, 4096)):
        rng = np.random.default_rng(shape)
        parts = jnp.asarray(8 * rng.standard_normal((num_ranks, *shape)), jnp.float32).astype(dtype)
        if parts[0].nbytes % 4:
            continue

        def sums(part, words):
            first = triton.all_reduce(part[0], part[0] * 0, peers=words[0, 0])
            _, last = jax.lax.scan(lambda _, i: (_, triton.all_reduce(part[0], peers=words[0, 0])), 0, jnp.arange(300))
            return jnp.stack([first, last[0], last[-1]])[None]

        found = jax.jit(jax.shard_map(sums, mesh=mesh, check_vma=False, **specs))(parts, memory.words)
        wide = np.asarray(parts.astype(jnp.float32)).astype(np.int64 if dtype == "int32" else np.float32)
        expected = jnp.asarray(wide.sum(0), jnp.float32 if dtype != "int32" else jnp.int32).astype(dtype)
        expected = np.broadcast_to(np.asarray(expected.astype(jnp.float32)), found.shape)
        np.testing.assert_array_equal(np.asarray(found.astype(jnp.float32)), expected, f"{shape}")


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 4096), (7168, 4096), (96, 70)])
def test_gpus_have_the_same_products_added_up_whichever_kernel_the_table_chooses(gpus, inputs, outputs):
    num_ranks, mesh, memory = gpus
    ranks = PartitionSpec("tensor")
    for rows in (1, 5, 8, 64):
        rng = np.random.default_rng(rows)
        x = jnp.asarray(rng.standard_normal((num_ranks, rows, inputs)), jnp.bfloat16)
        weights = jnp.asarray(rng.standard_normal((num_ranks, 2, inputs, outputs)) / inputs**0.5, jnp.bfloat16)
        residual = jnp.asarray(rng.standard_normal((rows, outputs)), jnp.bfloat16)

        def sums(module, x, weights, residual, words):
            stack = Stack(weights[0], 1)
            return module.linear_all_reduce(x[0], weights[0, 1], residual, stack=stack, peers=words[0, 0])[None]

        def added_up(module, *arrays):
            specs = (ranks, ranks, PartitionSpec(), PartitionSpec("data", "tensor"))
            each = functools.partial(sums, module)
            run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=ranks, check_vma=False))
            return np.asarray(run(*arrays, memory.words).astype(jnp.float32))

        wide = [np.asarray(array.astype(jnp.float32), np.float64) for array in (x, weights, residual)]
        expected = (wide[0] @ wide[1][:, 1]).sum(0) + wide[2]
        found, plain = added_up(tuned, x, weights, residual), added_up(reference, x, weights, residual)
        np.testing.assert_array_equal(found, np.broadcast_to(found[:1], found.shape))  # all ranks have the same sum
        errors = [np.linalg.norm(each[0] - expected) for each in (found, plain)]
        assert errors[0] <= 1.5 * errors[1], (rows, errors)
