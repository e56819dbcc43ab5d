"""The families once more, in plain numpy and float64, as transformers' own model files word them.

One sequence, no cache, no sharing with the engine: config.json and tensors go in by Hugging Face's names.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest


def plain_logits(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], ids: list[int], length: int = 0):
    """The logits [T, V] of every position. `length` is the longest context of the run, for ropes that depend on it."""
    model = Plain(config, tensors, length)
    x = model.t["model.embed_tokens.weight"][ids] * model.embedding_scale()
    for layer in range(config["num_hidden_layers"]):
        x = model.layer(x, layer)
    head = model.t.get("lm_head.weight", model.t["model.embed_tokens.weight"])
    logits = model.norm(x, "model.norm") @ head.T * config.get("logit_scale", 1.0) / config.get("logits_scaling", 1.0)
    cap = config.get("final_logit_softcapping")
    return np.tanh(logits / cap) * cap if cap else logits


class Plain:
    """One model's tensors, and its parts by name."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], length: int):
        self.c, self.length, self.kind = config, length, config["model_type"]
        self.t = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads

    def embedding_scale(self) -> float:
        if self.kind.startswith("gemma"):
            return float(np.sqrt(self.c["hidden_size"]))
        return self.c.get("embedding_multiplier", 1.0)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        weight = self.t[name + ".weight"] + (1.0 if self.kind.startswith("gemma") else 0.0)
        eps = next(self.c[key] for key in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon") if key in self.c)
        if self.kind in ("cohere", "cohere2", "starcoder2"):
            x = x - x.mean(-1, keepdims=True)
        normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
        return normed + self.t.get(name + ".bias", 0.0)

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.t[name + ".weight"].T + self.t.get(name + ".bias", 0.0)

    def layer(self, x: np.ndarray, layer: int) -> np.ndarray:
        at, scale = f"model.layers.{layer}.", self.c.get("residual_multiplier", 1.0)
        if self.kind in ("cohere", "cohere2"):
            normed = self.norm(x, at + "input_layernorm")
            return x + self.attention(normed, layer) + self.mlp(normed, at)
        if self.kind == "olmo2":
            x = x + self.norm(self.attention(x, layer), at + "post_attention_layernorm")
            return x + self.norm(self.mlp(x, at), at + "post_feedforward_layernorm")
        before, after = at + "post_attention_layernorm", None
        attended = self.attention(self.norm(x, at + "input_layernorm"), layer)
        if self.kind.startswith("gemma"):
            attended = self.norm(attended, before)
            before, after = at + "pre_feedforward_layernorm", at + "post_feedforward_layernorm"
        if self.kind == "glm4":
            attended, after = self.norm(attended, at + "post_self_attn_layernorm"), at + "post_mlp_layernorm"
        x = x + attended * scale
        out = self.mlp(self.norm(x, before), at)
        return x + (self.norm(out, after) if after else out) * scale

    def mlp(self, x: np.ndarray, at: str) -> np.ndarray:
        name = self.c.get("hidden_activation") or self.c.get("hidden_act", "silu")
        act = {"silu": silu, "gelu_pytorch_tanh": gelu_tanh}[name]
        if self.kind == "starcoder2":
            return self.linear(act(self.linear(x, at + "mlp.c_fc")), at + "mlp.c_proj")
        if at + "mlp.gate_up_proj.weight" in self.t:
            gate, up = np.split(self.linear(x, at + "mlp.gate_up_proj"), 2, axis=-1)
        else:
            gate, up = self.linear(x, at + "mlp.gate_proj"), self.linear(x, at + "mlp.up_proj")
        return self.linear(act(gate) * up, at + "mlp.down_proj")

    def attention(self, x: np.ndarray, layer: int) -> np.ndarray:
        at, count = f"model.layers.{layer}.self_attn.", len(x)
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if at + "qkv_proj.weight" in self.t:
            q, k, v = np.split(self.linear(x, at + "qkv_proj"), [q_size, q_size + kv_size], axis=-1)
        else:
            q, k, v = (self.linear(x, at + name) for name in ("q_proj", "k_proj", "v_proj"))
        if self.kind == "olmo2":
            q, k = self.norm(q, at + "q_norm"), self.norm(k, at + "k_norm")
        q, k, v = (y.reshape(count, -1, self.head_dim) for y in (q, k, v))
        if self.kind in ("qwen3", "gemma3_text") or self.c.get("use_qk_norm"):
            q, k = self.norm(q, at + "q_norm"), self.norm(k, at + "k_norm")
        window = self.window(layer)
        if self.turns(layer):
            q, k = self.rotate(q, window), self.rotate(k, window)
        k, v = (np.repeat(y, self.heads // self.kv_heads, axis=1) for y in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) * self.score_scale()
        cap = self.c.get("attn_logit_softcapping")
        scores = np.tanh(scores / cap) * cap if cap else scores
        i, j = np.arange(count)[:, None], np.arange(count)[None]
        seen = (j <= i) & (j > i - window) if window else j <= i
        weights = np.exp(np.where(seen, scores, -np.inf) - np.where(seen, scores, -np.inf).max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self.linear(np.einsum("hij,jhd->ihd", weights, v).reshape(count, -1), at + "o_proj")

    def score_scale(self) -> float:
        if self.kind.startswith("gemma"):
            return self.c["query_pre_attn_scalar"] ** -0.5
        return self.c.get("attention_multiplier") or self.head_dim**-0.5

    def window(self, layer: int) -> int | None:
        if self.kind in ("mistral", "phi3", "starcoder2"):
            return self.c.get("sliding_window")
        every = {"gemma2": 2, "cohere2": self.c.get("sliding_window_pattern")}.get(self.kind)
        if every is not None:
            return self.c["sliding_window"] if (layer + 1) % every else None
        types = self.c.get("layer_types")
        return self.c["sliding_window"] if types and types[layer] == "sliding_attention" else None

    def turns(self, layer: int) -> bool:
        if self.kind == "cohere2":
            return self.window(layer) is not None
        return bool(self.c["no_rope_layers"][layer]) if self.kind == "smollm3" else True

    def rotate(self, x: np.ndarray, window: int | None) -> np.ndarray:
        options = self.c.get("rope_parameters") or {}
        share = self.c.get("partial_rotary_factor") or 1.0
        theta = options.get("rope_theta") or self.c["rope_theta"]
        if self.kind == "gemma3_text" and window:
            theta = self.c["rope_local_base_freq"]
        dim = int(self.head_dim * share)
        freq, scale = stretched(self.c, theta, dim, self.length)
        angle = np.arange(len(x))[:, None] * freq
        cos, sin = np.cos(angle)[:, None] * scale, np.sin(angle)[:, None] * scale
        turned, rest = x[..., :dim], x[..., dim:]
        if self.kind in ("cohere", "cohere2", "glm", "glm4"):
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
        else:
            a, b = np.split(turned, 2, axis=-1)
            turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return np.concatenate([turned, rest], axis=-1)


def stretched(config: Mapping[str, Any], theta: float, dim: int, length: int) -> tuple[np.ndarray, float]:
    """Frequencies and attention factor."""
    options = config.get("rope_scaling") or {}
    kind, exponent = options.get("rope_type") or options.get("type"), np.arange(0, dim, 2) / dim
    freq, factor = theta**-exponent, float(options.get("factor") or 1.0)
    if kind == "linear":
        return freq / factor, 1.0
    if kind == "dynamic":
        trained = config["max_position_embeddings"]
        grown = theta * (factor * max(length, trained) / trained - (factor - 1)) ** (dim / (dim - 2))
        return grown**-exponent, 1.0
    if kind == "longrope":
        trained = config["original_max_position_embeddings"]
        growth = config["max_position_embeddings"] / trained
        factors = np.asarray(options["long_factor" if length > trained else "short_factor"])
        return freq / factors, math.sqrt(1 + math.log(growth) / math.log(trained))
    if kind == "yarn":
        trained = options["original_max_position_embeddings"]
        low, high = (dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32.0, 1.0))
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
        return freq / factor * ramp + freq * (1 - ramp), 0.1 * math.log(factor) + 1
    if kind == "llama3":
        trained = options["original_max_position_embeddings"]
        low, high = options["low_freq_factor"], options["high_freq_factor"]
        smooth = np.clip((trained * freq / (2 * math.pi) - low) / (high - low), 0, 1)
        return (1 - smooth) * freq / factor + smooth * freq, 1.0
    assert kind is None, kind
    return freq, 1.0


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.fixture(scope="session")
def plain() -> Callable[..., np.ndarray]:
    return plain_logits
