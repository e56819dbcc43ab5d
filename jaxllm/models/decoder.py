"""The decoder's modules, assembled from a ModelConfig. Knows one device's share of the arrays; no requests, no loading.

Every parameter is one line: its shape and its logical axes. Everything else a layer reads comes in as arguments.
Axes: T tokens, D model, N query heads, K KV heads, G = N / K, H head size, F feed-forward, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.config import ModelConfig

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


class Kernels(NamedTuple):
    """The chosen version of each operation; see jaxllm.kernels.select."""

    paged_attention: Callable
    kv_write: Callable
    apply_rope: Callable
    rms_norm: Callable


class LayerChoice:
    """A matrix of every layer, as {layer: array}, and the traced number of the layer that is running."""

    def __init__(self, layer: Int[Array, ""], arrays: dict[int, jax.Array]):
        self.layer = layer
        self.arrays = [arrays[l] for l in range(len(arrays))]


def product(subscripts: str, x: jax.Array, param: nnx.Param) -> jax.Array:
    """The einsum of x and a weight. Of a LayerChoice the running layer's branch multiplies, and no weight is copied."""
    weight = param.get_value()
    if not isinstance(weight, LayerChoice):
        return jnp.einsum(subscripts, x, weight)
    return jax.lax.switch(weight.layer, [lambda x, w=w: jnp.einsum(subscripts, x, w) for w in weight.arrays], x)


class LayerPlace(NamedTuple):
    """Where one layer finds its block table and cache slot, and its window and rope. Integers, or traced scalars."""

    group: int | Int[Array, ""]
    slot: int | Int[Array, ""]
    window: int | Int[Array, ""] | None
    rope: int | Int[Array, ""]


class StepContext(NamedTuple):
    """What every layer of a step reads besides weights and cache. R ropes, G KV groups, B requests, M table width."""

    cos: Float[Array, "R T H2"]
    sin: Float[Array, "R T H2"]
    write_block: Int[Array, "G T"]
    write_offset: Int[Array, " T"]
    block_table: Int[Array, "G B M"]
    query_start: Int[Array, " B+1"]
    context_len: Int[Array, " B"]


def weight(shape: tuple[int, ...], axes: tuple[str | None, ...], cfg: ModelConfig, rngs: nnx.Rngs) -> nnx.Param:
    """A parameter with one logical axis name per dimension; vectors start as ones (less the norm offset)."""
    dtype = jnp.dtype(cfg.dtype)
    if len(shape) == 1:
        value = jnp.full(shape, 1.0 - cfg.norm_offset, dtype)
    else:
        value = (jax.random.normal(rngs.params(), shape) * 0.02).astype(dtype)
    return nnx.Param(value, logical_axes=axes)


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245) over the paged cache.

    `qkv_proj` is stored by KV head: its G query heads, its key, its value. A shard over KV heads is then a rank's own
    q|k|v whatever the mesh.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        D, N, K, H = cfg.d_model, cfg.num_q_heads, cfg.num_kv_heads, cfg.head_dim
        self.qkv_proj = weight((D, K, N // K + 2, H), ("embed", "kv_heads", None, "head_dim"), cfg, rngs)
        self.o_proj = weight((N, H, D), ("q_heads", "head_dim", "embed"), cfg, rngs)
        if cfg.qk_norm:
            self.q_norm = weight((H,), ("head_dim",), cfg, rngs)
            self.k_norm = weight((H,), ("head_dim",), cfg, rngs)
        self.cfg = cfg

    def __call__(self, x_TD, kv, place: LayerPlace, step: StepContext, kernels: Kernels):
        cfg = self.cfg
        qkv_TKJH = product("TD,DKJH->TKJH", x_TD, self.qkv_proj)
        q_TNH = qkv_TKJH[:, :, :-2].reshape(x_TD.shape[0], -1, cfg.head_dim)
        k_TKH, v_TKH = qkv_TKJH[:, :, -2], qkv_TKJH[:, :, -1]
        if cfg.qk_norm:
            q_TNH = kernels.rms_norm(q_TNH, self.q_norm[...], eps=cfg.norm_eps, offset=cfg.norm_offset)
            k_TKH = kernels.rms_norm(k_TKH, self.k_norm[...], eps=cfg.norm_eps, offset=cfg.norm_offset)
        cos, sin = step.cos[place.rope], step.sin[place.rope]
        q_TNH = kernels.apply_rope(q_TNH, cos, sin)
        k_TKH = kernels.apply_rope(k_TKH, cos, sin)
        kv = kernels.kv_write(kv, place.slot, k_TKH, v_TKH, step.write_block[place.group], step.write_offset)
        attended_TNH = kernels.paged_attention(
            q_TNH,
            kv,
            place.slot,
            step.block_table[place.group],
            step.query_start,
            step.context_len,
            scale=cfg.attention_scale,
            window=place.window,
            softcap=cfg.attention_softcap,
        )
        return jax.lax.psum(product("TNH,NHD->TD", attended_TNH, self.o_proj), "tensor"), kv


class MLP(nnx.Module):
    """The gated feed-forward (Shazeer, 2020, arXiv:2002.05202); `gate_up_proj` holds gate and up side by side."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        D, F = cfg.d_model, cfg.d_ff
        self.gate_up_proj = weight((D, 2, F), ("embed", None, "ffn"), cfg, rngs)
        self.down_proj = weight((F, D), ("ffn", "embed"), cfg, rngs)
        self.cfg = cfg

    def __call__(self, x_TD):
        gate_up_T2F = product("TD,DiF->TiF", x_TD, self.gate_up_proj)
        hidden_TF = ACTIVATIONS[self.cfg.activation](gate_up_T2F[:, 0]) * gate_up_T2F[:, 1]
        return jax.lax.psum(product("TF,FD->TD", hidden_TF, self.down_proj), "tensor")


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and, with `post_norms`, before one too."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = weight((cfg.d_model,), ("embed",), cfg, rngs)
        self.attention = Attention(cfg, rngs)
        self.mlp_norm = weight((cfg.d_model,), ("embed",), cfg, rngs)
        self.mlp = MLP(cfg, rngs)
        if cfg.post_norms:
            self.post_attention_norm = weight((cfg.d_model,), ("embed",), cfg, rngs)
            self.post_mlp_norm = weight((cfg.d_model,), ("embed",), cfg, rngs)
        self.cfg = cfg

    def __call__(self, x_TD, kv, place: LayerPlace, step: StepContext, kernels: Kernels):
        cfg = self.cfg

        def norm(x, param):
            return kernels.rms_norm(x, param[...], eps=cfg.norm_eps, offset=cfg.norm_offset)

        out_TD, kv = self.attention(norm(x_TD, self.attention_norm), kv, place, step, kernels)
        x_TD = x_TD + (norm(out_TD, self.post_attention_norm) if cfg.post_norms else out_TD)
        out_TD = self.mlp(norm(x_TD, self.mlp_norm))
        return x_TD + (norm(out_TD, self.post_mlp_norm) if cfg.post_norms else out_TD), kv


class Embedding(nnx.Module):
    """Token ids -> vectors."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.tokens = weight((cfg.vocab_size, cfg.d_model), ("vocab", "embed"), cfg, rngs)
        self.cfg = cfg

    def __call__(self, token_T):
        x_TD = self.tokens[...][token_T]
        if self.cfg.embed_scale != 1.0:
            x_TD = x_TD * jnp.asarray(self.cfg.embed_scale, x_TD.dtype)
        return x_TD


class Head(nnx.Module):
    """The last norm and the projection onto the vocabulary; tied models project with the embedding."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.norm = weight((cfg.d_model,), ("embed",), cfg, rngs)
        if not cfg.tie_embeddings:
            self.proj = weight((cfg.vocab_size, cfg.d_model), ("vocab", "embed"), cfg, rngs)
        self.cfg = cfg

    def __call__(self, x_BD, embedding_VD, kernels: Kernels) -> Float[Array, "B V"]:
        cfg = self.cfg
        x_BD = kernels.rms_norm(x_BD, self.norm[...], eps=cfg.norm_eps, offset=cfg.norm_offset)
        proj_VD = embedding_VD if cfg.tie_embeddings else self.proj[...]
        logits_BV = jnp.einsum("BD,VD->BV", x_BD, proj_VD).astype(jnp.float32)
        if cfg.final_softcap is not None:
            logits_BV = jnp.tanh(logits_BV / cfg.final_softcap) * cfg.final_softcap
        return logits_BV


class Decoder(nnx.Module):
    """A whole decoder-only language model."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.embedding = Embedding(cfg, rngs)
        self.layers = nnx.List([DecoderLayer(cfg, rngs) for _ in range(cfg.num_layers)])
        self.head = Head(cfg, rngs)
        self.cfg = cfg
