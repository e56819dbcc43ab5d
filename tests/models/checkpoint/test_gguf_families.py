import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.gguf_config import hf_config, hf_generation_config
from jaxllm.models.checkpoint.gguf_families import TensorFacts
from jaxllm.models.checkpoint.gguf_fields import GGUFFields
from jaxllm.models.checkpoint.gguf_file import GGUFFile
from jaxllm.models.checkpoint.gguf_names import ARCHITECTURES

SHAPE: dict[str, Any] = {
    "block_count": 4,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def config(
    architecture: str, changes: dict[str, Any], biased: bool = False, **factors: np.ndarray | None
) -> dict[str, Any]:
    metadata = {f"{architecture}.{key}": value for key, value in (SHAPE | changes).items() if value is not None}
    facts = TensorFacts(320, tied=True, attention_bias=biased, mlp_bias=False, torch_dtype="bfloat16", **factors)
    return hf_config(GGUFFields(Path("m.gguf"), architecture, metadata), facts)


def test_a_llama_with_a_window_is_a_mistral():
    assert config("llama", {})["architectures"] == ["LlamaForCausalLM"]
    made = config("llama", {"attention.sliding_window": 4096})
    assert (made["architectures"], made["sliding_window"]) == (["MistralForCausalLM"], 4096)
    assert "attention_bias" not in made
    assert config("mistral3", {})["sliding_window"] is None


def test_a_ministral_is_refused_for_what_is_particular_to_it():
    with pytest.raises(InputError, match=r"m\.gguf is a Ministral 3, whose queries are scaled by position"):
        config("mistral3", {"attention.temperature_scale": 0.1})
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0}
    with pytest.raises(InputError, match=r"yarn with rope\.scaling\.yarn_log_multiplier = 1\.0 is not readable"):
        config("mistral3", {**yarn, "rope.scaling.yarn_log_multiplier": 1.0})


def test_qwens_name_a_window_that_none_of_them_uses():
    for architecture in ("qwen2", "qwen3"):
        made = config(architecture, {"attention.sliding_window": 4096}, biased=True)
        assert (made["use_sliding_window"], made["sliding_window"]) == (False, None)
        assert made.get("attention_bias") == (True if architecture == "qwen3" else None)


def test_yarn_keeps_its_settings():
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 1024, "yarn_beta_fast": 16.0}
    made = config("qwen2", {f"rope.scaling.{key}": value for key, value in {**yarn, "yarn_attn_factor": 1.5}.items()})
    assert made["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16.0,
        "attention_factor": 1.5,
    }


def test_gemma2_alternates_and_has_the_caps_of_the_published_models():
    made = config("gemma2", {})
    assert made["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert (made["sliding_window"], made["attn_logit_softcapping"], made["final_logit_softcapping"]) == (4096, 50, 30)
    assert made["query_pre_attn_scalar"] == 16
    big = {"block_count": 46, "embedding_length": 4608, "attention.head_count": 32, "attention.key_length": 128}
    assert config("gemma2", {**big, "attention.value_length": 128})["query_pre_attn_scalar"] == 144


def test_phi3_has_factors_for_long_and_short_contexts():
    long, short = np.linspace(1, 8, 8), np.linspace(1, 2, 8)
    changes = {"context_length": 131072, "rope.scaling.original_context_length": 4096}
    made = config("phi3", changes, long_factors=long, short_factors=short)
    assert made["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
    }
    assert (made["max_position_embeddings"], made["original_max_position_embeddings"]) == (131072, 4096)
    with pytest.raises(InputError, match="for long or for short contexts only"):
        config("phi3", changes, long_factors=long)
    with pytest.raises(InputError, match="7 rope factors for heads of 16"):
        config("phi3", changes, long_factors=long, short_factors=short[1:])


def test_phi3_may_turn_part_of_its_heads_and_others_may_not():
    changes = {"rope.dimension_count": 12}
    assert config("phi3", changes)["partial_rotary_factor"] == 0.75
    assert config("phi3", {})["partial_rotary_factor"] == 1.0
    with pytest.raises(InputError, match=r"rotates 12 of 16 values per head: partial rope .* architecture qwen2"):
        config("qwen2", changes)
    with pytest.raises(InputError, match="rotates 24 of 16 values"):
        config("phi3", {"rope.dimension_count": 24})


def test_the_window_of_old_phi3_files_is_that_of_the_published_model():
    assert config("phi3", {"block_count": 32})["sliding_window"] == 2047
    assert config("phi3", {"block_count": 32, "context_length": 131072})["sliding_window"] is None
    assert config("phi3", {"block_count": 32, "attention.sliding_window": 0})["sliding_window"] is None
    assert config("phi3", {"attention.sliding_window": 24})["sliding_window"] == 24


JUNK = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([-1, 0, 1, 3, 1025, 2**31]),
    st.floats(),
    st.booleans(),
    st.text(max_size=5),
    st.lists(st.integers(0, 3), max_size=5),
    st.lists(st.text(max_size=2), max_size=2),
)
KEYS = (
    *SHAPE,
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attn_logit_softcapping",
    "expert_count",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
)
FACTORS = st.none() | st.lists(st.floats(width=32), min_size=8, max_size=8).map(np.array)


@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    changes=st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=3),
    factors=FACTORS,
    long_factors=FACTORS,
)
@settings(derandomize=True, max_examples=600, deadline=None)
def test_corrupt_metadata_gives_a_config_or_one_line(
    architecture: str, changes: dict[str, Any], factors: np.ndarray | None, long_factors: np.ndarray | None
) -> None:
    refusal = "one line"
    try:
        made = config(
            architecture, changes, rope_factors=factors, long_factors=long_factors, short_factors=long_factors
        )
        assert "NaN" not in json.dumps(made)
        assert "Infinity" not in json.dumps(made)
        assert (made.get("sliding_window") or 1) > 0
        assert len(made.get("layer_types", [])) in (0, made["num_hidden_layers"])
    except InputError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert len(refusal) < 400


@given(value=JUNK, key=st.sampled_from(["tokenizer.ggml.eos_token_id", "general.sampling.temp"]))
@settings(derandomize=True, max_examples=60, deadline=None)
def test_corrupt_generation_settings_give_settings_or_one_line(key: str, value: object) -> None:
    refusal = "one line"
    try:
        hf_generation_config(GGUFFields(Path("m.gguf"), "llama", {key: value}))
    except InputError as error:
        refusal = str(error)
    assert "\n" not in refusal


@settings(derandomize=True, max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_bytes_of_a_header_give_a_file_or_one_line(tiny_file: tuple[Path, bytes], data: st.DataObject) -> None:
    path, whole = tiny_file
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, 900))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged[: data.draw(st.integers(24, len(whole)) | st.just(len(whole)))])
    refusal = "one line"
    try:
        file = GGUFFile(path)
        for name in file.names():
            file.read(name, 0, min(2, file.shape(name)[0]))
    except InputError as error:
        refusal = str(error)
    assert "\n" not in refusal.replace(str(path), "")


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    for key, value in SHAPE.items():
        if isinstance(value, float):
            writer.add_float32(f"qwen2.{key}", value)
        else:
            writer.add_uint32(f"qwen2.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab"])
    for name, shape in (("token_embd.weight", (32, 64)), ("output_norm.weight", (64,)), ("blk.0.attn_q.bias", (64,))):
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, path.read_bytes()
