from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.gguf_config import hf_config, hf_generation_config
from jaxllm.models.checkpoint.gguf_families import TensorFacts
from jaxllm.models.checkpoint.gguf_fields import GGUFFields

FACTS = TensorFacts(
    vocab_size=320, tied=True, attention_bias=False, mlp_bias=False, torch_dtype="bfloat16", rope_factors=None
)
SHAPE = {
    "block_count": 6,
    "context_length": 512,
    "embedding_length": 48,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
GEMMA = {**SHAPE, "attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 16}


def config(architecture: str, metadata: dict[str, Any]) -> dict[str, Any]:
    return hf_config(fields(architecture, metadata), FACTS)


def fields(architecture: str, metadata: dict[str, Any]) -> GGUFFields:
    full = {
        key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}": metadata[key]
        for key in metadata
    }
    return GGUFFields(Path("m.gguf"), architecture, full)


def test_llama_defaults_are_those_of_llama_cpp():
    made = config("llama", {key: SHAPE[key] for key in SHAPE if key != "attention.head_count_kv"})
    assert made["head_dim"] == 12
    assert made["num_key_value_heads"] == 4
    assert made["rope_theta"] == 10000.0
    assert (made["bos_token_id"], made["eos_token_id"]) == (None, None)


def test_gemma_layers_follow_the_pattern_of_five_and_one_unless_the_file_says_otherwise():
    sliding, full = "sliding_attention", "full_attention"
    assert config("gemma3", GEMMA)["layer_types"] == [sliding] * 5 + [full]
    key = "attention.sliding_window_pattern"
    assert config("gemma3", {**GEMMA, key: 3})["layer_types"] == [sliding, sliding, full] * 2
    flags = [False, True, True, True, True, False]
    assert config("gemma3", {**GEMMA, key: flags})["layer_types"] == [full, sliding, sliding, sliding, sliding, full]
    assert config("gemma3", {**GEMMA, key: [True] * 6})["layer_types"] == [sliding] * 6
    with pytest.raises(InputError, match=r"pattern \[True\] does not fit 6 layers"):
        config("gemma3", {**GEMMA, key: [True]})


def test_a_gemma_file_without_a_window_has_full_layers_only():
    made = config("gemma3", {key: GEMMA[key] for key in GEMMA if key != "attention.sliding_window"})
    assert made["sliding_window"] is None
    assert made["layer_types"] == ["full_attention"] * 6


def test_only_gemma_27b_scales_its_queries_by_the_width_per_head():
    assert config("gemma3", GEMMA)["query_pre_attn_scalar"] == 32
    big = {
        **GEMMA,
        "block_count": 62,
        "embedding_length": 5376,
        "attention.head_count": 32,
        "attention.key_length": 128,
    }
    assert config("gemma3", {**big, "attention.value_length": 128})["query_pre_attn_scalar"] == 168
    assert config("gemma3", SHAPE)["head_dim"] == 256


def test_transformers_reads_the_gemma_config_as_the_published_one():
    from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig

    metadata = {**GEMMA, "rope.freq_base": 100000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    read = Gemma3TextConfig(**config("gemma3", metadata))
    assert read.rope_parameters == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert (read.head_dim, read.sliding_window, read.query_pre_attn_scalar) == (32, 16, 32)
    assert read.hidden_activation == Gemma3TextConfig().hidden_activation
    assert read.layer_types == Gemma3TextConfig(num_hidden_layers=6).layer_types


def test_every_token_that_ends_a_turn_is_an_end():
    ids = {
        f"tokenizer.ggml.{name}_token_id": value for name, value in (("bos", 2), ("eos", 1), ("eot", 106), ("eom", 1))
    }
    assert hf_generation_config(fields("gemma3", ids)) == {"bos_token_id": 2, "eos_token_id": [1, 106]}
    assert hf_generation_config(fields("gemma3", {"tokenizer.ggml.eos_token_id": 1})) == {"eos_token_id": 1}
    assert hf_generation_config(fields("gemma3", {})) == {}
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    assert hf_generation_config(fields("llama", sampling)) == {"temperature": 0.6, "top_k": 20}


def test_a_missing_or_mistyped_key_is_named():
    with pytest.raises(InputError, match=r"m\.gguf lacks the metadata key llama\.block_count"):
        config("llama", {key: SHAPE[key] for key in SHAPE if key != "block_count"})
    with pytest.raises(InputError, match=r"llama\.embedding_length is 'wide', not a whole number"):
        config("llama", {**SHAPE, "embedding_length": "wide"})
    with pytest.raises(InputError, match=r"rms_epsilon is 'tiny', not a number"):
        config("llama", {**SHAPE, "attention.layer_norm_rms_epsilon": "tiny"})


def test_a_value_per_layer_is_read_when_all_layers_agree():
    assert config("llama", {**SHAPE, "attention.head_count_kv": [2] * 6})["num_key_value_heads"] == 2
    with pytest.raises(InputError, match=r"head_count_kv is '\[2, 2, 1\]', not a whole number"):
        config("llama", {**SHAPE, "attention.head_count_kv": [2, 2, 1]})


def test_factors_of_another_length_than_the_heads_are_refused():
    facts = TensorFacts(320, True, False, False, "bfloat16", np.linspace(1, 2, 4))
    with pytest.raises(InputError, match="4 rope factors for heads of 12"):
        hf_config(fields("llama", SHAPE), facts)
