"""Rotary embeddings as numbers: a base, how its frequencies are stretched, and by how much cos and sin are scaled.

Knows formulas; no config file, no device.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary embedding: its base, the features it turns, and how its frequencies are stretched.

    `length` is the longest context of the run, on which the scalings "dynamic" and "longrope" depend: all keys of a
    cache must be turned by the same frequencies. 0 stands for any length that the model was first trained for.
    """

    theta: float
    dim: int
    scaling: tuple[tuple[str, Any], ...] = ()
    length: int = 0

    def at_length(self, length: int) -> "RopeConfig":
        """Gives the same rope for a run whose contexts have at most `length` tokens."""
        return dataclasses.replace(self, length=length)

    def inv_freq(self) -> np.ndarray:
        """Gives the dim / 2 angular frequencies in radians per position, float32."""
        # In float32 throughout, as the reference implementations compute it.
        return _STRETCHES[self.kind](self, dict(self.scaling)).astype(np.float32)

    @property
    def attention_factor(self) -> float:
        """What cosine and sine are multiplied by."""
        factor = _ATTENTION_FACTORS.get(self.kind)
        return 1.0 if factor is None else factor(dict(self.scaling))

    @property
    def kind(self) -> str:
        return dict(self.scaling).get("rope_type", "default")

    def is_long(self) -> bool:
        """Tells whether the run goes beyond the length that the model was first trained for."""
        return self.length > dict(self.scaling).get(ORIGINAL, self.length)


def _frequencies(theta: float, dim: int) -> np.ndarray:
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (np.float32(1.0) / np.power(np.float32(theta), exponent)).astype(np.float32)


def _default(rope: RopeConfig, options: Mapping[str, Any]) -> np.ndarray:
    return _frequencies(rope.theta, rope.dim)


def _none(rope: RopeConfig, options: Mapping[str, Any]) -> np.ndarray:
    """No turn at any position."""
    return np.zeros(rope.dim // 2, np.float32)


def _linear(rope: RopeConfig, options: Mapping[str, Any]) -> np.ndarray:
    """Divides all frequencies (Chen et al., 2023, arXiv:2306.15595)."""
    return _frequencies(rope.theta, rope.dim) / np.float32(options["factor"])


def _factors(rope: RopeConfig, options: Mapping[str, Any]) -> np.ndarray:
    """Divides each frequency by its own number."""
    return _frequencies(rope.theta, rope.dim) / np.asarray(options["factors"], np.float32)


def _dynamic(rope: RopeConfig, options: Mapping[str, Any]) -> np.ndarray:
    """Raises the base as far as the longest context needs (NTK-aware scaling)."""
    if not rope.is_long():
        return _frequencies(rope.theta, rope.dim)
    stretch = options["factor"] * rope.length / options[ORIGINAL] - (options["factor"] - 1)
    return _frequencies(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim)


def _llama3(rope: RopeConfig, options: Mapping[str, Any]) -> np.ndarray:
    """Divides the slow frequencies only, and blends between, as published with Llama 3.1."""
    freq = _frequencies(rope.theta, rope.dim)
    low, high = float(options["low_freq_factor"]), float(options["high_freq_factor"])
    turns = float(options[ORIGINAL]) * freq / np.float32(2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0).astype(np.float32)
    return (1 - blend) * freq / np.float32(options["factor"]) + blend * freq


def _yarn(rope: RopeConfig, options: Mapping[str, Any]) -> np.ndarray:
    """Divides slow frequencies, keeps fast ones, and blends linearly by index (Peng et al., 2023, arXiv:2309.00071)."""

    def index_of(turns: float) -> float:
        waves = options[ORIGINAL] / (turns * 2 * math.pi)
        return rope.dim * math.log(waves) / (2 * math.log(rope.theta))

    low, high = index_of(options.get("beta_fast") or 32), index_of(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / np.float32(high - low), 0, 1)
    freq = _frequencies(rope.theta, rope.dim)
    return freq / np.float32(options["factor"]) * ramp + freq * (1 - ramp)


def _yarn_attention_factor(options: Mapping[str, Any]) -> float:
    if options.get("attention_factor") is not None:
        return float(options["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if options["factor"] <= 1 else 0.1 * weight * math.log(options["factor"]) + 1.0

    if options.get("mscale") and options.get("mscale_all_dim"):
        return mscale(options["mscale"]) / mscale(options["mscale_all_dim"])
    return mscale(1.0)


def _longrope(rope: RopeConfig, options: Mapping[str, Any]) -> np.ndarray:
    """Divides each frequency by its own number, of two lists (Ding et al., 2024, arXiv:2402.13753)."""
    factors = np.asarray(options["long_factor" if rope.is_long() else "short_factor"], np.float32)
    return _frequencies(rope.theta, rope.dim) / factors


def _longrope_attention_factor(options: Mapping[str, Any]) -> float:
    if options.get("attention_factor") is not None:
        return float(options["attention_factor"])
    factor = options["factor"]
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(options[ORIGINAL]))


_STRETCHES: dict[str, Callable[[RopeConfig, Mapping[str, Any]], np.ndarray]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "factors": _factors,
    "none": _none,
}
_ATTENTION_FACTORS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "yarn": _yarn_attention_factor,
    "longrope": _longrope_attention_factor,
}


def no_rope(dim: int) -> RopeConfig:
    """A rope that turns nothing, for the layers of a model that have none."""
    return RopeConfig(1.0, dim, (("rope_type", "none"),))
