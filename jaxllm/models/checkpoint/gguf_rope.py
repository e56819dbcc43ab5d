"""Recovers Hugging Face's rope_scaling from GGUF metadata and factors. Knows no model and reads no file."""

import math
from typing import Any

import numpy as np

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.gguf_fields import GGUFFields

# Every published Llama 3 has these two; only the quotient of the three llama3 parameters can be read off the factors.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR = 1.0, 4.0
_TOLERANCE = 1e-4
_YARN_KEYS = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def rope_scaling(
    fields: GGUFFields,
    factors: np.ndarray | None,
    theta: float,
    long_factors: np.ndarray | None = None,
    short_factors: np.ndarray | None = None,
) -> dict[str, Any] | None:
    """Gives the rope_scaling entry of a Hugging Face config; None for plain rope.

    `factors` (what each frequency is divided by) become `llama3` where its formula reproduces them, and are passed on
    as {"rope_type": "factors", "factors": [...]} where it doesn't. Factors for long and short contexts are `longrope`.

    Raises:
        InputError: the scaling is not known, or factors are no positive numbers or lack their counterpart.
    """
    for found in (factors, long_factors, short_factors):
        if found is not None and not (np.isfinite(found).all() and (found > 0).all()):
            raise InputError(f"{fields.path} is garbage: its rope factors are not all positive; download it again")
    if long_factors is not None and short_factors is not None:
        return {
            "rope_type": "longrope",
            "long_factor": long_factors.tolist(),
            "short_factor": short_factors.tolist(),
        }
    if long_factors is not None or short_factors is not None:
        raise InputError(f"{fields.path} has rope factors for long or for short contexts only; convert the model again")
    if factors is not None and not np.allclose(factors, 1.0, rtol=_TOLERANCE):
        return recover_llama3(factors, theta) or {"rope_type": "factors", "factors": factors.tolist()}
    kind = fields.find("rope.scaling.type")
    factor = fields.optional_number("rope.scaling.factor") or fields.optional_number("rope.scale_linear")
    if kind == "none" or factor is None or (factor == 1.0 and kind != "yarn"):
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise InputError(f"{fields.path}: rope scaling of type {kind!r} is not known; known are none, linear, yarn")
    return _yarn(fields, factor)


def _yarn(fields: GGUFFields, factor: float) -> dict[str, Any]:
    # In llama.cpp these two change what Hugging Face's yarn has no word for.
    for key, plain in (("yarn_log_multiplier", 0.0), ("yarn_ext_factor", 1.0)):
        value = fields.number(f"rope.scaling.{key}", plain)
        if value != plain:
            raise InputError(f"{fields.path}: yarn with rope.scaling.{key} = {value} is not readable from GGUF")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.integer(
            "rope.scaling.original_context_length", fields.integer("context_length")
        ),
    }
    for key, name in _YARN_KEYS.items():
        if (value := fields.optional_number(f"rope.scaling.{key}")) is not None:
            scaling[name] = value
    return scaling


def llama3_factors(scaling: dict[str, Any], theta: float, num_freqs: int) -> np.ndarray:
    """Computes what Llama 3's scaling divides each frequency by."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    wavelengths = 2 * math.pi * theta ** (np.arange(num_freqs) / num_freqs)
    kept = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    kept = np.clip(kept, 0.0, 1.0)
    return 1.0 / ((1.0 - kept) / factor + kept)


def recover_llama3(factors: np.ndarray, theta: float) -> dict[str, Any] | None:
    """Finds the llama3 parameters that give these factors; None when there are none."""
    factor = float(factors.max())
    between = (factors > 1.0 + _TOLERANCE) & (factors < factor * (1.0 - _TOLERANCE))
    if factors.min() < 1.0 - _TOLERANCE or not between.any():
        return None
    wavelengths = 2 * math.pi * theta ** (np.arange(len(factors)) / len(factors))
    kept = (1.0 / factors[between] - 1.0 / factor) / (1.0 - 1.0 / factor)
    lengths = wavelengths[between] * (kept * (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR) + _LOW_FREQ_FACTOR)
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": round(float(np.median(lengths))),
    }
    return scaling if np.allclose(llama3_factors(scaling, theta, len(factors)), factors, rtol=_TOLERANCE) else None
