"""The decoder's modules, assembled from a ModelConfig. Knows one device's share of the arrays; no requests, no loading.

Every parameter is one line: its shape and its logical axes. Everything else a layer reads comes in as arguments.
Axes: T tokens, D model, N query heads, K KV heads, G = N / K, H head size, F feed-forward, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.kernels.fused_linear.reference import ACTIVATIONS
from jaxllm.models.config import ModelConfig
from jaxllm.models.linear import Residual, linear_add, norm_gated_linear, norm_linear
from jaxllm.models.norms import NoNorm, Norm, head_norm, model_norm
from jaxllm.models.parameters import bias, in_place, times, weight
from jaxllm.models.step_context import Kernels, LayerPlace, StepContext
from jaxllm.models.tensor_axis import first_of_rank, sum_over_ranks


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245) over the paged cache.

    `qkv_proj` is stored by KV head: its G query heads, its key, its value. A shard over KV heads is then a rank's own
    q|k|v whatever the mesh.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        D, N, K, H = cfg.d_model, cfg.num_q_heads, cfg.num_kv_heads, cfg.head_dim
        self.qkv_proj = weight((D, K, N // K + 2, H), ("embed", "kv_heads", None, "head_dim"), cfg, rngs)
        self.o_proj = weight((N, H, D), ("q_heads", "head_dim", "embed"), cfg, rngs)
        if cfg.qkv_bias:
            self.qkv_bias = bias((K, N // K + 2, H), ("kv_heads", None, "head_dim"), cfg)
        if cfg.o_bias:
            self.o_bias = bias((D,), ("embed",), cfg)
        self.q_norm = head_norm(cfg, N, "q_heads")
        self.k_norm = head_norm(cfg, K, "kv_heads")
        self.cfg = cfg

    def __call__(
        self,
        x_TD,
        norm: Norm | NoNorm,
        residual: Residual | None,
        kv,
        place: LayerPlace,
        step: StepContext,
        kernels: Kernels,
    ):
        cfg = self.cfg
        qkv_TKJH = norm_linear("TD,DKJH->TKJH", x_TD, norm, self.qkv_proj, kernels)
        qkv_TKJH, fused = self._prepared(qkv_TKJH, step, kernels)
        q_TNH, kv = kernels.rope_kv_write(
            kv,
            place.slot,
            qkv_TKJH,
            step.cos[place.rope],
            step.sin[place.rope],
            step.write_block[place.group],
            step.write_offset,
            **fused,
        )
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
            plan=step.plan,
        )
        o_bias = self.o_bias[...] if cfg.o_bias else None
        return linear_add("TNH,NHD->TD", attended_TNH, self.o_proj, o_bias, residual, kernels), kv

    def _prepared(self, qkv_TKJH, step: StepContext, kernels: Kernels) -> tuple[Any, dict[str, Any]]:
        """Does what the fused operation cannot do; the rest, bias and plain head norms, goes along as its options."""
        cfg = self.cfg
        fused = {"bias": self.qkv_bias} if cfg.qkv_bias else {}
        q_norm, k_norm = self.q_norm, self.k_norm
        is_plain = cfg.qk_norm == "head" and cfg.norm == "rms" and not cfg.rope_interleaved
        if is_plain and isinstance(q_norm, Norm) and isinstance(k_norm, Norm):
            params = in_place(**fused, q_norm=q_norm.scale, k_norm=k_norm.scale)
            return qkv_TKJH, params | {"eps": cfg.norm_eps, "norm_offset": cfg.norm_offset}
        if cfg.qk_norm is None and not cfg.rope_interleaved:
            return qkv_TKJH, in_place(**fused)
        if cfg.qkv_bias:
            qkv_TKJH = qkv_TKJH + self.qkv_bias[...]
        T, K = qkv_TKJH.shape[:2]
        q_TNH = self.q_norm(qkv_TKJH[:, :, :-2].reshape(T, -1, cfg.head_dim), kernels)
        k_TKH = self.k_norm(qkv_TKJH[:, :, -2], kernels)
        if cfg.rope_interleaved:
            num_pairs = step.cos.shape[-1]
            q_TNH, k_TKH = _pairs_apart(q_TNH, num_pairs), _pairs_apart(k_TKH, num_pairs)
        q_TKGH = q_TNH.reshape(T, K, -1, cfg.head_dim)
        return jnp.concatenate([q_TKGH, k_TKH[:, :, None], qkv_TKJH[:, :, -1:]], axis=2), {}


def _pairs_apart(x_TNH, num_pairs: int):
    """Moves the first feature of each pair before the second ones; q and k, both moved, have the same product."""
    pairs = x_TNH[..., : 2 * num_pairs].reshape(*x_TNH.shape[:-1], num_pairs, 2)
    return jnp.concatenate([pairs[..., 0], pairs[..., 1], x_TNH[..., 2 * num_pairs :]], axis=-1)


class GatedMLP(nnx.Module):
    """The gated feed-forward (Shazeer, 2020, arXiv:2002.05202); `gate_up_proj` holds gate and up side by side."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        D, F = cfg.d_model, cfg.d_ff
        self.gate_up_proj = weight((D, 2, F), ("embed", None, "ffn"), cfg, rngs)
        self.down_proj = weight((F, D), ("ffn", "embed"), cfg, rngs)
        if cfg.mlp_bias:
            self.gate_up_bias = bias((2, F), (None, "ffn"), cfg)
            self.down_bias = bias((D,), ("embed",), cfg)
        self.cfg = cfg

    def __call__(self, x_TD, norm: Norm | NoNorm, residual: Residual | None, kernels: Kernels):
        cfg = self.cfg
        gate_up_bias, down_bias = (self.gate_up_bias[...], self.down_bias[...]) if cfg.mlp_bias else (None, None)
        hidden_TF = norm_gated_linear(x_TD, norm, self.gate_up_proj, gate_up_bias, cfg.activation, kernels)
        return linear_add("TF,FD->TD", hidden_TF, self.down_proj, down_bias, residual, kernels)


class PlainMLP(nnx.Module):
    """The feed-forward of two products."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        D, F = cfg.d_model, cfg.d_ff
        self.up_proj = weight((D, F), ("embed", "ffn"), cfg, rngs)
        self.down_proj = weight((F, D), ("ffn", "embed"), cfg, rngs)
        if cfg.mlp_bias:
            self.up_bias = bias((F,), ("ffn",), cfg)
            self.down_bias = bias((D,), ("embed",), cfg)
        self.cfg = cfg

    def __call__(self, x_TD, norm: Norm | NoNorm, residual: Residual | None, kernels: Kernels):
        cfg = self.cfg
        up_TF = norm_linear("TD,DF->TF", x_TD, norm, self.up_proj, kernels)
        hidden_TF = ACTIVATIONS[cfg.activation](up_TF + self.up_bias[...] if cfg.mlp_bias else up_TF)
        down_bias = self.down_bias[...] if cfg.mlp_bias else None
        return linear_add("TF,FD->TD", hidden_TF, self.down_proj, down_bias, residual, kernels)


def _mlp(cfg: ModelConfig, rngs: nnx.Rngs) -> GatedMLP | PlainMLP:
    return GatedMLP(cfg, rngs) if cfg.gated_mlp else PlainMLP(cfg, rngs)


class DecoderLayer(nnx.Module):
    """Attention, then MLP, each between the norms that the model has."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = model_norm(cfg, cfg.pre_norms)
        self.attention = Attention(cfg, rngs)
        self.post_attention_norm = model_norm(cfg, cfg.post_norms)
        self.mlp_norm = model_norm(cfg, cfg.pre_norms)
        self.mlp = _mlp(cfg, rngs)
        self.post_mlp_norm = model_norm(cfg, cfg.post_norms)
        self.cfg = cfg

    def __call__(self, x_TD, kv, place: LayerPlace, step: StepContext, kernels: Kernels):
        residual = Residual(x_TD, self.post_attention_norm, self.cfg.residual_scale)
        x_TD, kv = self.attention(x_TD, self.attention_norm, residual, kv, place, step, kernels)
        residual = Residual(x_TD, self.post_mlp_norm, self.cfg.residual_scale)
        return self.mlp(x_TD, self.mlp_norm, residual, kernels), kv


class ParallelLayer(nnx.Module):
    """Attention and MLP side by side, behind one norm; the tensor ranks add up both at once."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = model_norm(cfg)
        self.attention = Attention(cfg, rngs)
        self.mlp = _mlp(cfg, rngs)
        self.cfg = cfg

    def __call__(self, x_TD, kv, place: LayerPlace, step: StepContext, kernels: Kernels):
        norm = self.attention_norm
        attended_TD, kv = self.attention(x_TD, norm, None, kv, place, step, kernels)
        both_TD = sum_over_ranks(attended_TD + self.mlp(x_TD, norm, None, kernels), kernels)
        return x_TD + times(both_TD, self.cfg.residual_scale), kv


class Embedding(nnx.Module):
    """Token ids -> vectors. Each tensor rank has some tokens' rows, looks those up, and gets the others' added."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.tokens = weight((cfg.vocab_rows, cfg.d_model), ("vocab", "embed"), cfg, rngs)
        self.cfg = cfg

    def __call__(self, token_T, kernels: Kernels):
        row_VD = self.tokens[...]
        if jax.lax.axis_size("tensor") == 1:
            return times(row_VD[token_T], self.cfg.embed_scale)
        own_T = token_T - first_of_rank(len(row_VD))
        is_own_T = (own_T >= 0) & (own_T < len(row_VD))
        x_TD = jnp.where(is_own_T[:, None], row_VD[jnp.clip(own_T, 0, len(row_VD) - 1)], 0)
        return times(sum_over_ranks(x_TD, kernels), self.cfg.embed_scale)


class Head(nnx.Module):
    """The last norm and the projection onto the vocabulary; tied models project with the embedding.

    Each tensor rank gives the logits of its own tokens; rows of no token, behind the last, get -inf.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.norm = model_norm(cfg)
        if not cfg.tie_embeddings:
            self.proj = weight((cfg.vocab_rows, cfg.d_model), ("vocab", "embed"), cfg, rngs)
        self.cfg = cfg

    def __call__(self, x_BD, embedding_VD, kernels: Kernels) -> Float[Array, "B V"]:
        cfg = self.cfg
        proj_VD = embedding_VD if cfg.tie_embeddings else self.proj[...]
        logits_BV = kernels.matmul(self.norm(x_BD, kernels), proj_VD, transposed=True).astype(jnp.float32)
        logits_BV = times(logits_BV, cfg.logit_scale)
        if cfg.final_softcap is not None:
            logits_BV = jnp.tanh(logits_BV / cfg.final_softcap) * cfg.final_softcap
        num_own = len(proj_VD)
        if num_own * jax.lax.axis_size("tensor") > cfg.vocab_size:
            token_V = first_of_rank(num_own) + jnp.arange(num_own)
            logits_BV = jnp.where(token_V < cfg.vocab_size, logits_BV, -jnp.inf)
        return logits_BV


class Decoder(nnx.Module):
    """A whole decoder-only language model."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        layer = ParallelLayer if cfg.parallel_mlp else DecoderLayer
        self.embedding = Embedding(cfg, rngs)
        self.layers = nnx.List([layer(cfg, rngs) for _ in range(cfg.num_layers)])
        self.head = Head(cfg, rngs)
        self.cfg = cfg
