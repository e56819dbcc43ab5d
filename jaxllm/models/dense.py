"""The decoder over whole sequences without a cache, differentiable: for trainers and for tests. Runs no requests.

It is the same decoder code as the engine's. Only a few kernels are other ones: the keys and values that a layer would
write to the cache stay with it, attention sees them directly, and products are XLA's, which it can differentiate.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.kernels.matmul import reference
from jaxllm.kernels.rope_kv_write.reference import split_and_turn
from jaxllm.mesh.axes import AxisRules
from jaxllm.models.decoder import Kernels, StepContext
from jaxllm.models.forward import DecoderProgram, Weights, project, rope_tables, run_layers, weights_tree


def make_dense_logits(program: DecoderProgram, kernels: Kernels, mesh: Mesh, rules: AxisRules) -> Callable:
    """Gives logits(weights, token [B, S]) -> float32 logits [B, S, V] of the token behind each, to be differentiated.

    `weights` has the layout of `program`, whose layers should be stacked (build_program's default): with separate
    arrays a gradient would be summed over all layers in each of them. Attention needs memory for S x S scores; shorter
    sequences are padded behind their end, where causality keeps the padding from changing anything.
    """
    kernels = kernels._replace(rope_kv_write=_keep, plan_attention=_plan_nothing, paged_attention=_attend)
    whole = PartitionSpec()
    specs = weights_tree({spec.path: rules.spec(*spec.stored_axes) for spec in program.params})
    kernels = kernels._replace(matmul=reference.matmul)

    def logits(weights: Weights, token_BS: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        return jax.lax.map(lambda token_S: _sequence(program, kernels, weights, token_S), token_BS)

    return jax.shard_map(logits, mesh=mesh, in_specs=(specs, whole), out_specs=whole, check_vma=False)


def stack_layers(weights: Weights) -> Weights:
    """Gives weights whose layers are stacked, of a tuple of layers or of {layer: array}; others stay as they are."""
    if isinstance(weights["layers"], tuple):
        return weights | {"layers": jax.tree.map(lambda *each: jnp.stack(each), *weights["layers"])}
    return weights | {"layers": _each_parameter(weights["layers"], lambda w: jnp.stack([w[l] for l in range(len(w))]))}


def _each_parameter(tree: Any, stack: Callable) -> Any:
    if not isinstance(tree, dict):
        return tree
    return stack(tree) if 0 in tree else {name: _each_parameter(branch, stack) for name, branch in tree.items()}


def _sequence(program: DecoderProgram, kernels: Kernels, weights: Weights, token_S) -> Float[Array, "S V"]:
    cfg, S = program.cfg, token_S.shape[0]
    cos, sin = rope_tables(cfg, jnp.arange(S, dtype=jnp.int32))
    num_groups = len(cfg.kv_layout.windows)
    nowhere = jnp.zeros((num_groups, 1), jnp.int32)
    context = StepContext(
        cos=cos,
        sin=sin,
        write_block=nowhere,
        write_offset=jnp.zeros(1, jnp.int32),
        block_table=nowhere[:, None],
        query_start=jnp.asarray([0, S], jnp.int32),
        context_len=jnp.asarray([S], jnp.int32),
    )
    num_ranks = jax.lax.axis_size("tensor")
    none = jnp.zeros((S, cfg.num_kv_heads // num_ranks, cfg.head_dim), jnp.dtype(cfg.dtype))
    no_cache: Any = (none, none)
    hidden_SD, _ = run_layers(program, kernels, weights, no_cache, token_S, context)
    logits_SV = project(program, kernels, weights, hidden_SD)
    if num_ranks > 1:
        logits_SV = jax.lax.all_gather(logits_SV, "tensor", axis=1, tiled=True)[:, : cfg.vocab_size]
    return logits_SV


def _keep(kv, slot, qkv_SKJH, cos, sin, block, offset, **options):
    q_SNH, k_SKH, v_SKH = split_and_turn(qkv_SKJH, cos, sin, **options)
    return q_SNH, (k_SKH, v_SKH)


def _plan_nothing(*_, **__):
    return None


def _attend(q_SNH, kv, *_, scale, window=None, softcap=None, sinks=None, plan=None):
    k_SKH, v_SKH = kv
    S, N, H = q_SNH.shape
    K = k_SKH.shape[1]
    q_SKGH = q_SNH.reshape(S, K, N // K, H)
    logits_KGST = jnp.einsum("SKGH,TKH->KGST", q_SKGH, k_SKH, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        logits_KGST = jnp.tanh(logits_KGST / softcap) * softcap
    query_S1, key_T = jnp.arange(S)[:, None], jnp.arange(S)
    seen_ST = key_T <= query_S1
    if window is not None:
        seen_ST &= key_T > query_S1 - window
    logits_KGST = jnp.where(seen_ST, logits_KGST, -jnp.inf)
    if sinks is not None:
        sink_KGS1 = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(K, N // K, 1, 1), (K, N // K, S, 1))
        logits_KGST = jnp.concatenate([logits_KGST, sink_KGS1], axis=-1)
    weight_KGST = jax.nn.softmax(logits_KGST, axis=-1)[..., :S].astype(v_SKH.dtype)
    return jnp.einsum("KGST,TKH->SKGH", weight_KGST, v_SKH).reshape(S, N, H)
