import json

import pytest

from jaxllm.config.engine_args import engine_args
from jaxllm.config.errors import InputError
from jaxllm.engine.generation_config import choose_generation_config, sampling_defaults
from jaxllm.engine.model_source import find_model, merge_overrides

OF_MODEL = {"eos_token_id": [2, 5], "temperature": 0.7, "top_k": 20, "do_sample": True, "max_new_tokens": 40}


def chosen(**options):
    return choose_generation_config(engine_args(options), OF_MODEL)


def test_the_models_own_file_holds_unless_the_user_says_otherwise():
    assert chosen() == OF_MODEL
    assert sampling_defaults(chosen()) == {"temperature": 0.7, "top_k": 20, "max_tokens": 40}


def test_with_vllm_only_the_ends_of_a_text_are_the_models():
    assert chosen(generation_config="vllm") == {"eos_token_id": [2, 5], "do_sample": True}
    assert sampling_defaults(chosen(generation_config="vllm")) == {}


def test_another_file_takes_the_place_of_the_models(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.1}))
    for place in (tmp_path, tmp_path / "generation_config.json"):
        assert chosen(generation_config=str(place)) == {"temperature": 0.1}


def test_single_keys_are_overridden_whichever_file_holds():
    override = {"temperature": 0.2, "top_p": 0.5}
    assert sampling_defaults(chosen(override_generation_config=override)) == {
        "temperature": 0.2,
        "top_p": 0.5,
        "top_k": 20,
        "max_tokens": 40,
    }
    assert sampling_defaults(chosen(generation_config="vllm", override_generation_config=override)) == override


def test_a_null_is_no_default():
    assert sampling_defaults({"temperature": None, "top_k": 3}) == {"top_k": 3}


def test_mistakes_are_one_line(tmp_path):
    with pytest.raises(InputError, match="generation_config='nowhere' is neither auto, vllm, a folder with "):
        chosen(generation_config="nowhere")
    with pytest.raises(InputError, match="is neither auto, vllm, a folder"):
        chosen(generation_config=str(tmp_path))
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(InputError, match="holds a JSON list, not an object"):
        chosen(generation_config=str(tmp_path))
    with pytest.raises(InputError) as raised:
        sampling_defaults({"temperature": -1.0})
    assert str(raised.value) == (
        "the model's generation_config.json: temperature must be at least 0, got -1.0; "
        "set generation_config='vllm' to leave it aside, or override_generation_config"
    )
    with pytest.raises(InputError, match=r"override_generation_config must be a dictionary, got \[1\]"):
        engine_args({"override_generation_config": [1]})


def test_overrides_are_merged_into_the_models_configuration_however_deep():
    config = {"a": 1, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "b": None}
    merged = merge_overrides(config, {"rope_parameters": {"rope_theta": 5.0}, "b": {"c": 1}, "d": 2})
    assert merged == {"a": 1, "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}, "b": {"c": 1}, "d": 2}
    assert config["rope_parameters"]["rope_theta"] == 1e4


def test_overrides_decide_the_family_too(golden):
    with pytest.raises(InputError, match="unsupported architecture: Vapour"):
        find_model(engine_args({"model": str(golden / "llama"), "hf_overrides": {"architectures": ["Vapour"]}}))
