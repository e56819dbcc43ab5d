import pytest

from jaxllm.config.errors import InputError
from jaxllm.models import registry
from jaxllm.models.families import gemma3, llama
from jaxllm.models.family import Family
from jaxllm.models.registry import find_family, register


@pytest.fixture(autouse=True)
def _forget_what_a_test_registers(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def test_the_first_known_architecture_is_taken():
    assert find_family({"architectures": ["LlamaForCausalLM"]}) == ("LlamaForCausalLM", llama.FAMILY)
    assert find_family({"architectures": ["Vapour", "Gemma3ForCausalLM"]}) == ("Gemma3ForCausalLM", gemma3.FAMILY)


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(
        InputError, match="unsupported architecture: Vapour, Smoke; supported are Gemma3ForCausalLM, Llama"
    ):
        find_family({"architectures": ["Vapour", "Smoke"]})
    with pytest.raises(InputError, match="unsupported architecture: model_type 'vapour' without `architectures`; supp"):
        find_family({"model_type": "vapour", "architectures": None})


def test_a_family_from_outside_is_found_and_may_replace_one():
    own = Family(llama.configure, lambda cfg: {})
    register("Vapour", own)
    assert find_family({"architectures": ["Vapour"]}) == ("Vapour", own)
    with pytest.raises(InputError, match="supported are Gemma3ForCausalLM, LlamaForCausalLM, Vapour"):
        find_family({"architectures": ["Smoke"]})
    register("LlamaForCausalLM", own)
    assert find_family({"architectures": ["LlamaForCausalLM"]})[1] is own
