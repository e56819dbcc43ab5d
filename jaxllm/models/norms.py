"""The norms of a decoder, chosen by its ModelConfig. Each is called as norm(x, kernels); knows no layer."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.models.config import ModelConfig
from jaxllm.models.parameters import Axes, bias, norm_scale
from jaxllm.models.step_context import Kernels
from jaxllm.models.tensor_axis import sum_apart


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last axis."""

    def __init__(self, cfg: ModelConfig, shape: tuple[int, ...], axes: Axes):
        self.scale = norm_scale(shape, axes, cfg)
        if cfg.norm_bias:
            self.bias = bias(shape, axes, cfg)
        self.cfg = cfg

    def __call__(self, x, kernels: Kernels):
        cfg = self.cfg
        if cfg.norm == "rms":
            return kernels.rms_norm(x, self.scale[...], eps=cfg.norm_eps, offset=cfg.norm_offset)
        return kernels.layer_norm(x, self.scale[...], self.bias[...] if cfg.norm_bias else None, eps=cfg.norm_eps)


class AllHeadsNorm(nnx.Module):
    """RMSNorm over all heads together; each tensor rank holds some of them, so the ranks add up their squares.

    A KV head that is held several times adds its squares as often; empty places add none and are not counted.
    """

    def __init__(self, cfg: ModelConfig, num_heads: int, heads_axis: str):
        self.scale = norm_scale((num_heads, cfg.head_dim), (heads_axis, "head_dim"), cfg)
        self.num_features = _num_filled(cfg, num_heads, heads_axis) * cfg.head_dim
        self.eps = cfg.norm_eps

    def __call__(self, x_TNH, kernels: Kernels):
        x_f32_TNH = x_TNH.astype(jnp.float32)
        squares_T = sum_apart(jnp.sum(x_f32_TNH * x_f32_TNH, axis=(1, 2)))
        factor_T = jax.lax.rsqrt(squares_T / self.num_features + self.eps)
        return (x_f32_TNH * factor_T[:, None, None] * self.scale[...].astype(jnp.float32)).astype(x_TNH.dtype)


def _num_filled(cfg: ModelConfig, num_heads: int, heads_axis: str) -> int:
    if cfg.heads is None:
        return num_heads
    return cfg.heads.num_q_heads if heads_axis == "q_heads" else cfg.heads.num_kv_heads * cfg.heads.replicas


class NoNorm(nnx.Module):
    """Where a model has no norm."""

    def __call__(self, x, kernels: Kernels):
        return x


def model_norm(cfg: ModelConfig, wanted: bool = True) -> Norm | NoNorm:
    """A norm over the model's width."""
    return Norm(cfg, (cfg.d_model,), ("embed",)) if wanted else NoNorm()


def head_norm(cfg: ModelConfig, num_heads: int, heads_axis: str) -> Norm | AllHeadsNorm | NoNorm:
    """The norm of queries or of keys, after `qk_norm`."""
    if cfg.qk_norm is None:
        return NoNorm()
    if cfg.qk_norm == "head":
        return Norm(cfg, (cfg.head_dim,), ("head_dim",))
    if cfg.qk_norm == "each_head":
        return Norm(cfg, (num_heads, cfg.head_dim), (heads_axis, "head_dim"))
    return AllHeadsNorm(cfg, num_heads, heads_axis)
