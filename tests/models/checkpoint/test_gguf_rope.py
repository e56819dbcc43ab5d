from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.gguf_fields import GGUFFields
from jaxllm.models.checkpoint.gguf_rope import rope_scaling


def fields(**metadata: object) -> GGUFFields:
    rope = {f"llama.rope.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return GGUFFields(Path("m.gguf"), "llama", {"llama.context_length": 4096, **rope})


def converter_factors(theta: float, num_freqs: int, factor: float, low: float, high: float, old: int) -> np.ndarray:
    """What llama.cpp's converter writes for a Llama 3 model, one frequency at a time, in float32."""
    factors = []
    for i in range(num_freqs):
        wavelength = 2 * np.pi * theta ** (i / num_freqs)
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32).astype(np.float64)


@pytest.mark.parametrize(
    ("theta", "num_freqs", "factor", "old"),
    [(500000.0, 64, 8.0, 8192), (500000.0, 32, 32.0, 8192), (10000.0, 8, 8.0, 64)],
    ids=["Llama 3.1 8B", "Llama 3.2 1B", "tiny"],
)
def test_llama3_scaling_is_recovered_from_its_factors(theta, num_freqs, factor, old):
    factors = converter_factors(theta, num_freqs, factor, 1.0, 4.0, old)
    assert rope_scaling(fields(), factors, theta) == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": old,
    }


@pytest.mark.parametrize(
    "factors",
    [
        np.linspace(1.0, 3.0, 32),
        np.full(32, 2.0),
        np.linspace(0.5, 4.0, 32),
        converter_factors(500000.0, 32, 8.0, 2.0, 5.0, 8192),
    ],
    ids=["linear", "constant", "below one", "other low and high"],
)
def test_other_factors_are_passed_on(factors):
    scaling = rope_scaling(fields(), factors, 500000.0)
    assert scaling == {"rope_type": "factors", "factors": factors.tolist()}


def test_factors_of_one_are_plain_rope():
    assert rope_scaling(fields(), np.ones(32), 10000.0) is None


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, None),
        ({"scaling__type": "none", "scaling__factor": 4.0}, None),
        ({"scaling__type": "linear", "scaling__factor": 1.0}, None),
        ({"scaling__type": "linear", "scaling__factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ({"scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 1024},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        ),
    ],
)
def test_scaling_named_in_the_metadata_keeps_its_name(metadata: dict[str, object], expected: dict[str, Any] | None):
    assert rope_scaling(fields(**metadata), None, 10000.0) == expected


def test_an_unknown_scaling_is_refused():
    with pytest.raises(InputError, match="rope scaling of type 'longrope' is not known; known are none, linear, yarn"):
        rope_scaling(fields(scaling__type="longrope", scaling__factor=4.0), None, 10000.0)
