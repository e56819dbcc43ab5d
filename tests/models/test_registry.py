import pytest

import jaxllm.models
from jaxllm.config.errors import InputError
from jaxllm.models import registry
from jaxllm.models.families import gemma3, llama
from jaxllm.models.family import Family
from jaxllm.models.registry import find_family, register, supported


@pytest.fixture(autouse=True)
def _forget_what_a_test_registers(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def test_the_first_known_architecture_is_taken():
    assert find_family({"architectures": ["LlamaForCausalLM"]}) == ("LlamaForCausalLM", llama.FAMILY)
    assert find_family({"architectures": ["Vapour", "Gemma3ForCausalLM"]}) == ("Gemma3ForCausalLM", gemma3.FAMILY)


def test_an_unknown_architecture_is_refused_with_the_nearest_known_ones_and_the_page_that_helps():
    with pytest.raises(InputError) as raised:
        find_family({"architectures": ["Qwen2MoeForCausalLM"]})
    message = str(raised.value)
    assert message.startswith("unsupported architecture: Qwen2MoeForCausalLM; nearest to it are Qwen2ForCausalLM, ")
    assert message.endswith("; docs/adding-a-model.md says how to add one")
    assert "Starcoder2" not in message
    assert "\n" not in message


def test_an_architecture_like_no_other_is_refused_with_all_known_ones():
    with pytest.raises(InputError, match="unsupported architecture: Vapour, Smoke; supported are Cohere2ForCausalLM, "):
        find_family({"architectures": ["Vapour", "Smoke"]})
    with pytest.raises(InputError, match="unsupported architecture: model_type 'vapour' without `architectures`; supp"):
        find_family({"model_type": "vapour", "architectures": None})


def test_every_family_can_be_imported():
    for architecture in supported():
        assert find_family({"architectures": [architecture]})[1].configure


def test_a_family_from_outside_is_found_and_may_replace_one():
    own = Family(llama.configure, lambda cfg: {})
    register("Vapour", own)
    assert find_family({"architectures": ["Vapour"]}) == ("Vapour", own)
    with pytest.raises(InputError, match=r"supported are .*Starcoder2ForCausalLM, Vapour;"):
        find_family({"architectures": ["Smoke"]})
    jaxllm.models.register("LlamaForCausalLM", own)
    assert find_family({"architectures": ["LlamaForCausalLM"]})[1] is own
