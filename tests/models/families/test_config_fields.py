"""Every key of config.json that a family reads changes what the model computes, or is refused."""

import contextlib
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxllm.config.errors import InputError
from jaxllm.models.read_config import ReadFields
from jaxllm.models.registry import find_family, supported

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"

# One configuration for each architecture.
NAMES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi4_mini", "olmo2", "granite", "smollm3"),
    *("cohere", "cohere2", "glm", "glm4", "starcoder2"),
)
# Keys that say nothing about a forward pass: what the weights are stored in, what ends a text, how long it may be.
BESIDE_THE_LOGITS = {"architectures", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "max_position_embeddings"}
# Another value for each key, besides the truth values, which are turned over.
OTHER: dict[str, Any] = {
    "vocab_size": 321,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
    "bos_token_id": 7,
    "eos_token_id": [2, 7],
    "hidden_act": "gelu",
    "hidden_activation": "silu",
    "rms_norm_eps": 0.3,
    "layer_norm_eps": 0.3,
    "norm_epsilon": 0.3,
    "rope_theta": 500.0,
    "rope_local_base_freq": 50.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    "partial_rotary_factor": 0.25,
    "original_max_position_embeddings": 1024,
    "pretraining_tp": 2,
    "sliding_window": 5,
    "max_window_layers": 3,
    "sliding_window_pattern": 2,
    "_sliding_window_pattern": 2,
    "layer_switch": 2,
    "query_pre_attn_scalar": 4,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 0.5,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 0.1,
    "logits_scaling": 4.0,
    "logit_scale": 1.0,
    "no_rope_layers": [1, 0, 1, 0],
    "no_rope_layer_interval": 2,
    "rotary_pct": 0.5,
    "position_embedding_type": "alibi",
    "order_of_interleaved_layers": "global_attn_first",
    "norm_type": "rms_norm",
    "mlp_type": "gated",
    **dict.fromkeys(("use_embedding_sharing", "use_gated_activation", "use_parallel_block"), False),
}
# What else must be so for a key to count, as in transformers.
GIVEN: dict[str, dict[str, Any]] = {
    "sliding_window_pattern": {"layer_types": None},
    "_sliding_window_pattern": {"layer_types": None},
    "layer_switch": {"layer_types": None, "sliding_window_pattern": None},
    "no_rope_layer_interval": {"no_rope_layers": None},
    "rope_parameters": {"rope_scaling": None},
    "rope_theta": {"rope_parameters": None},
    "torch_dtype": {"dtype": None},
    "dtype": {"torch_dtype": None},
}
WINDOWED = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 16, "layer_types": None}
OF_QWEN = {"use_sliding_window": WINDOWED, "sliding_window": WINDOWED, "max_window_layers": WINDOWED}
OF_SMOLLM3 = dict.fromkeys(("use_sliding_window", "sliding_window"), WINDOWED)
GIVEN_IN = {"qwen2": OF_QWEN, "qwen3": OF_QWEN, "smollm3": OF_SMOLLM3}


def _configs() -> dict[str, dict[str, Any]]:
    spec = importlib.util.spec_from_file_location("make_golden", ROOT / "scripts" / "make_golden.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return {name: made.CONFIGS.get(name) or json.loads((GOLDEN / name / "config.json").read_text()) for name in NAMES}


CONFIGS = _configs()


def read_keys(name: str) -> list[str]:
    fields = ReadFields(CONFIGS[name])
    find_family(CONFIGS[name])[1].configure(fields)
    return sorted(fields.read)


CASES = [(name, key) for name in NAMES for key in read_keys(name) if key != "architectures"]


def other_value(name: str, key: str, value: Any) -> Any:
    if key == "layer_types":
        kinds = ["sliding_attention", "full_attention"]
        count = CONFIGS[name]["num_hidden_layers"]
        listed = [kinds[l % 2] for l in range(count)]
        return listed[::-1]
    if key in OTHER:
        return OTHER[key] if OTHER[key] != value else 2 * value
    assert value is None or isinstance(value, bool), f"add another value of {key} to OTHER"
    return not value


def before_and_after(name: str, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    given = GIVEN_IN.get(name, {}).get(key, GIVEN.get(key, {}))
    if key == "layer_types" and name in ("qwen2", "qwen3", "smollm3"):
        given = WINDOWED
    before = {**CONFIGS[name], **given}
    if name == "gemma3_text" and key == "rope_parameters":  # has one for each kind of layer
        return before, before | {key: {"full_attention": OTHER[key]}}
    if key == "rope_theta" and "rope_theta" not in before:
        before["rope_theta"] = 10000.0
    value = before.get(key)
    if value is None and key in ("attention_bias", "use_bias", "tie_word_embeddings"):
        value = find_family(before)[1].configure(before).qkv_bias if key != "tie_word_embeddings" else None
    return before, before | {key: other_value(name, key, value)}


def configured(config: dict[str, Any]):
    return find_family(config)[1].configure(config)


def test_every_architecture_has_a_configuration_here():
    architectures = {config["architectures"][0] for config in CONFIGS.values()}
    assert architectures == set(supported())


@pytest.mark.parametrize(("name", "key"), CASES)
def test_every_key_that_is_read_changes_the_model_or_is_refused(name, key):
    before, after = before_and_after(name, key)
    cfg = configured(before)
    with contextlib.suppress(InputError):
        assert configured(after) != cfg


# What the effect of a field depends on, among all that families set. A decoder knows its ModelConfig only, so families
# that agree in this are one case.
NORMS = ("norm", "norm_bias", "norm_offset", "pre_norms", "post_norms", "qk_norm", "parallel_mlp")
AROUND = {
    "norm_eps": NORMS,
    "activation": ("gated_mlp", "mlp_bias", "parallel_mlp"),
    "tie_embeddings": ("logit_scale", "final_softcap"),
}


def cases_of_logits() -> list[tuple[str, str]]:
    """Names and keys, one for each change of a decoder: that a key makes this change is the test's before this one."""
    cases: dict[tuple, tuple[str, str]] = {}
    for name, key in CASES:
        if key in BESIDE_THE_LOGITS:
            continue
        case: tuple = (name, key)
        with contextlib.suppress(InputError):
            before, after = map(configured, before_and_after(name, key))
            fields = [f.name for f in dataclasses.fields(before) if getattr(before, f.name) != getattr(after, f.name)]
            if len(fields) == 1 and fields[0] in AROUND:
                around = [getattr(before, other) for other in AROUND[fields[0]]]
                case = (fields[0], getattr(before, fields[0]), getattr(after, fields[0]), *around)
        cases.setdefault(case, (name, key))
    return [*cases.values()]


@pytest.fixture(scope="module")
def runners(tmp_path_factory, random_checkpoint, prompt_runner):
    """By name: tensors, and programs by all of their configuration but the ropes, which come in as tables."""
    tensors, programs = {}, {}

    def logits(name, cfg, prompt):
        if name not in tensors:
            golden = GOLDEN / name / "model.safetensors"
            made = not golden.exists()
            tensors[name] = random_checkpoint(tmp_path_factory.mktemp(name), name)[1] if made else load_file(golden)
        family = find_family(CONFIGS[name])[1]
        program = dataclasses.replace(cfg, dtype="float32", ropes=cfg.ropes[:0], eos_token_ids=(), bos_token_id=None)
        if (name, program) not in programs:
            programs[name, program] = prompt_runner(family, dataclasses.replace(cfg, dtype="float32"), tensors[name])
        runner = programs[name, program]
        runner.take(cfg)
        return runner.logits(prompt, cfg.max_position)

    return logits


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), cases_of_logits())
def test_every_key_that_is_read_changes_the_logits_or_is_refused(name, key, runners, make_golden):
    before, after = before_and_after(name, key)
    prompt = make_golden.random_prompts(CONFIGS[name]["vocab_size"])[3]
    first = runners(name, configured(before), prompt)[-1]
    with contextlib.suppress(InputError):
        assert np.abs(runners(name, configured(after), prompt)[-1] - first).max() > 1e-3
