import json
import logging

import pytest

from jaxllm.config.errors import InputError
from jaxllm.models.families import llama
from jaxllm.models.family import Family
from jaxllm.models.read_config import ReadFields, read_config
from jaxllm.models.registry import find_family
from jaxllm.models.shapes import find_shape, shape_names


@pytest.fixture
def hf(golden):
    return json.loads((golden / "llama" / "config.json").read_text())


def test_fields_remember_what_was_asked_for():
    fields = ReadFields({"a": 1, "b": 2, "c": 3})
    assert fields["a"] == 1
    assert fields.get("d") is None
    assert "b" in fields
    assert fields.read == {"a", "b", "d"}
    assert len(fields) == 3


def test_every_published_shape_and_every_golden_config_is_read(golden):
    configs = [find_shape(name) for name in shape_names()]
    configs += [json.loads(file.read_text()) for file in golden.glob("*/config.json")]
    assert len(configs) > 10
    for config in configs:
        assert config is not None
        assert read_config(find_family(config)[1], config).num_layers == config["num_hidden_layers"]


def test_a_key_that_transformers_knows_and_the_family_does_not_read_must_have_its_default(hf):
    def without_mlp_bias(hf):
        return llama.configure({key: hf[key] for key in hf if key != "mlp_bias"})

    own = Family(without_mlp_bias, lambda cfg: {})
    assert read_config(own, hf) == read_config(llama.FAMILY, hf)
    with pytest.raises(InputError) as raised:
        read_config(own, hf | {"mlp_bias": True})
    expected = "config.json: mlp_bias=True is not supported for LlamaForCausalLM (only False)"
    assert str(raised.value) == expected
    harmless = Family(own.configure, own.pieces, harmless=frozenset({"mlp_bias"}))
    assert read_config(harmless, hf | {"mlp_bias": True})


def test_a_key_that_nobody_knows_is_ignored_with_one_log_line(hf, caplog):
    with caplog.at_level(logging.INFO):
        read_config(llama.FAMILY, hf | {"colour": "red", "weight_in_kg": 3, "nothing": None})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "jaxllm.models.read_config"]
    assert line == (
        "config.json of LlamaForCausalLM: ignored colour, weight_in_kg, which transformers does not know either"
    )


def test_a_model_type_that_transformers_does_not_know_has_only_unknown_keys(hf):
    assert read_config(llama.FAMILY, hf | {"model_type": "vapour", "colour": "red"})
    assert read_config(llama.FAMILY, {k: v for k, v in hf.items() if k != "model_type"} | {"colour": "red"})


def test_bookkeeping_is_passed_over_without_a_word(hf, caplog):
    with caplog.at_level(logging.INFO):
        read_config(
            llama.FAMILY, hf | {"transformers_version": "4.1", "attention_dropout": 0.1, "id2label": {"0": "a"}}
        )
    assert not caplog.records


@pytest.mark.parametrize(
    ("key", "value"), [("quantization_config", {"quant_method": "awq"}), ("is_encoder_decoder", True)]
)
def test_what_transformers_handles_outside_the_configuration_is_refused(hf, key, value):
    with pytest.raises(InputError, match=f"config.json: {key}=.* is not supported for LlamaForCausalLM; leave it out"):
        read_config(llama.FAMILY, hf | {key: value})
    assert read_config(llama.FAMILY, hf | {key: None})


def test_an_override_that_nobody_reads_is_refused_with_the_nearest_key(hf):
    with pytest.raises(InputError) as raised:
        read_config(llama.FAMILY, hf | {"rope_teta": 5.0}, overridden=frozenset({"rope_teta"}))
    assert str(raised.value) == "hf_overrides: LlamaForCausalLM does not read 'rope_teta'; did you mean 'rope_theta'?"
    assert read_config(llama.FAMILY, hf | {"rope_theta": 5.0}, overridden=frozenset({"rope_theta"}))
