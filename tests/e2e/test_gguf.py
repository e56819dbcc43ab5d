"""The goldens as GGUF: written as llama.cpp's converter writes them, read back, and run.

Tensor names come from the gguf package's own table; what is done to rows and values, and which keys are written, is
taken from the rules of llama.cpp's conversion of each model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jaxllm import SamplingParams
from jaxllm.models.checkpoint.gguf_file import GGUFFile
from jaxllm.models.registry import find_family

GOLDEN = Path(__file__).parents[1] / "golden"
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Conversion:
    """How one golden becomes a GGUF file, and which keys of its config.json that file cannot hold."""

    arch: gguf.MODEL_ARCH
    norm_offset: float = 0.0
    permuted: bool = False
    writes_head_dim: bool = True
    lost: frozenset[str] = field(default_factory=frozenset)


GEMMA_LOST = frozenset({"query_pre_attn_scalar"})  # llama.cpp knows it by the size of the model
CONVERSIONS = {
    "llama": Conversion(gguf.MODEL_ARCH.LLAMA, permuted=True),
    "llama_tied": Conversion(gguf.MODEL_ARCH.LLAMA, permuted=True),
    "mistral": Conversion(gguf.MODEL_ARCH.MISTRAL3, permuted=True),
    "qwen2": Conversion(gguf.MODEL_ARCH.QWEN2, writes_head_dim=False),
    "qwen3": Conversion(gguf.MODEL_ARCH.QWEN3),
    "gemma2": Conversion(gguf.MODEL_ARCH.GEMMA2, norm_offset=1.0, lost=GEMMA_LOST),
    "gemma3_text": Conversion(gguf.MODEL_ARCH.GEMMA3, norm_offset=1.0, lost=GEMMA_LOST),
    "phi3": Conversion(gguf.MODEL_ARCH.PHI3, writes_head_dim=False),
}
# How a model was trained, or what only other settings of it would use.
NO_MATTER = {"initializer_range", "max_window_layers", "_sliding_window_pattern", "use_cache", "name_or_path"}


def read_golden(family: str) -> tuple[dict[str, Any], Tensors]:
    return json.loads((GOLDEN / family / "config.json").read_text()), load_file(GOLDEN / family / "model.safetensors")


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Puts the two halves of each head's rows in turn, as llama.cpp rotates neighbours."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def converted_tensors(config: Mapping[str, Any], tensors: Tensors, how: Conversion) -> Tensors:
    names = gguf.get_tensor_name_map(how.arch, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stored: Tensors = {}
    for name, values in tensors.items():
        module = name.split(".")[-2]
        if how.permuted and module in heads:
            values = permute(values, heads[module])
        if name.endswith("norm.weight"):
            values = values + np.float32(how.norm_offset)
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        stored[new_name] = values
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        stored["rope_freqs.weight"] = llama3_factors(config, scaling)
    if "long_factor" in scaling:
        stored["rope_factors_long.weight"] = np.array(scaling["long_factor"], np.float32)
        stored["rope_factors_short.weight"] = np.array(scaling["short_factor"], np.float32)
    return stored


def llama3_factors(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> np.ndarray:
    low, high, old = (
        scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    factors = []
    for i in range(0, config["head_dim"], 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (i / config["head_dim"])
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(scaling["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def write_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any], how: Conversion) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if how.writes_head_dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if how.arch != gguf.MODEL_ARCH.GEMMA2:
        writer.add_rope_freq_base(rope["rope_theta"])
    if how.permuted or how.arch == gguf.MODEL_ARCH.PHI3:
        writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1.0)))
    if how.arch == gguf.MODEL_ARCH.PHI3:
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_sliding_window(config["sliding_window"] or 0)
    elif config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if how.arch == gguf.MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if how.arch == gguf.MODEL_ARCH.GEMMA3:
        writer.add_float32("gemma3.rope.freq_base_swa", config["rope_local_base_freq"])
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array("gemma3.attention.sliding_window_pattern", kinds)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])


def write_gguf(path: Path, config: Mapping[str, Any], tensors: Tensors, how: Conversion, kind: Kind = Kind.F32) -> Path:
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[how.arch])
    write_metadata(writer, config, how)
    for name, values in converted_tensors(config, tensors, how).items():
        stored_as = kind if values.ndim == 2 else Kind.F32
        writer.add_tensor(name, gguf.quants.quantize(values, stored_as), raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", CONVERSIONS)
def test_every_tensor_comes_back_under_its_name_to_the_bit(family: str, tmp_path: Path) -> None:
    config, tensors = read_golden(family)
    how = CONVERSIONS[family]
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", config, tensors, how))
    assert sorted(file.names()) == sorted(tensors)
    for name, values in tensors.items():
        read = file.read(name, 0, values.shape[0])
        assert read.shape == values.shape
        # The one that Gemma's norms gain was rounded to float32 when it was added.
        expected = values + np.float32(1) - np.float32(1) if how.norm_offset and "norm" in name else values
        np.testing.assert_array_equal(read, expected, err_msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_quantised_tensors_come_back_within_a_rounding(family: str, tmp_path: Path) -> None:
    config, tensors = read_golden(family)
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", config, tensors, CONVERSIONS[family], Kind.Q8_0))
    for name, values in tensors.items():
        error = np.abs(file.read(name, 0, values.shape[0]) - values)
        if values.ndim == 1:
            assert error.max() == 0
            continue
        step = np.abs(values.reshape(values.shape[0], -1, 32)).max(axis=2, keepdims=True) / 127
        # Half a step, and the step itself is a float16.
        assert (error.reshape(values.shape[0], -1, 32) <= step * 0.57 + 1e-7).all(), name


@pytest.mark.parametrize("family", CONVERSIONS)
def test_transformers_reads_the_config_as_the_original_one(family: str, tmp_path: Path) -> None:
    config, tensors = read_golden(family)
    how = CONVERSIONS[family]
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", config, tensors, how))
    assert json.loads(json.dumps(file.config)) == file.config
    ours, original = (CONFIG_MAPPING[config["model_type"]](**fields).to_dict() for fields in (file.config, config))
    original.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    differing = {key for key in ours.keys() | original.keys() if ours.get(key) != original.get(key)}
    assert differing - NO_MATTER == how.lost
    if "query_pre_attn_scalar" in how.lost:
        assert ours["query_pre_attn_scalar"] == config["head_dim"]


@pytest.mark.parametrize("family", CONVERSIONS)
def test_the_engine_reads_the_config_as_the_original_one(family: str, tmp_path: Path) -> None:
    config, tensors = read_golden(family)
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", config, tensors, CONVERSIONS[family]))
    ours, original = (find_family(fields)[1].configure(fields) for fields in (file.config, config))
    if "query_pre_attn_scalar" in CONVERSIONS[family].lost:
        assert ours.attention_scale == config["head_dim"] ** -0.5
        original = replace(original, attention_scale=ours.attention_scale)
    assert ours == original


def with_head_dim_scale(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """The same Gemma with its query scale in the weights: GGUF has no key for one that is not the head's size."""
    scale = np.float32((config["head_dim"] / config["query_pre_attn_scalar"]) ** 0.5)
    scaled = dict(tensors)
    for name, values in tensors.items():
        if name.endswith("q_norm.weight"):
            scaled[name] = (values + 1) * scale - 1
        elif name.endswith("q_proj.weight") and config["model_type"] == "gemma2":
            scaled[name] = values * scale
    return scaled


# Interleaved rows, norms on queries and keys, and fused tensors; the others are much like one of these.
RUN_BY_DEFAULT = ("llama", "qwen3", "phi3")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in RUN_BY_DEFAULT else [pytest.mark.slow]) for name in CONVERSIONS],
)
def test_a_golden_gives_its_tokens_from_gguf_too(family: str, tmp_path: Path, engine_of, golden_cases) -> None:
    config, tensors = read_golden(family)
    if "query_pre_attn_scalar" in config:
        tensors = with_head_dim_scale(config, tensors)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, CONVERSIONS[family])
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 8 << 20}
    cases = golden_cases(family)
    with engine_of(family, model=str(path), **options) as driver:
        for i, case in enumerate(cases):
            driver.add(str(i), case["prompt_ids"], SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
        driver.run()
    for i, case in enumerate(cases):
        assert driver.tokens[str(i)] == case["output_ids"]
