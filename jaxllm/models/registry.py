"""Architecture name -> family. Knows which families exist; each family is a small file in families/."""

import difflib
import importlib
from collections.abc import Mapping

from jaxllm.config.errors import InputError
from jaxllm.models.family import Family

_FAMILY_MODULES = {
    "CohereForCausalLM": "jaxllm.models.families.cohere",
    "Cohere2ForCausalLM": "jaxllm.models.families.cohere2",
    "Gemma2ForCausalLM": "jaxllm.models.families.gemma2",
    "Gemma3ForCausalLM": "jaxllm.models.families.gemma3",
    "Glm4ForCausalLM": "jaxllm.models.families.glm4",
    "GlmForCausalLM": "jaxllm.models.families.glm",
    "GraniteForCausalLM": "jaxllm.models.families.granite",
    "LlamaForCausalLM": "jaxllm.models.families.llama",
    "MistralForCausalLM": "jaxllm.models.families.mistral",
    "Olmo2ForCausalLM": "jaxllm.models.families.olmo2",
    "Phi3ForCausalLM": "jaxllm.models.families.phi3",
    "Qwen2ForCausalLM": "jaxllm.models.families.qwen2",
    "Qwen3ForCausalLM": "jaxllm.models.families.qwen3",
    "SmolLM3ForCausalLM": "jaxllm.models.families.smollm3",
    "Starcoder2ForCausalLM": "jaxllm.models.families.starcoder2",
}
_registered: dict[str, Family] = {}


def register(architecture: str, family: Family) -> None:
    """Adds a family from outside the package, or replaces one."""
    _registered[architecture] = family


def find_family(hf_config: Mapping) -> tuple[str, Family]:
    """Gives the family of the first known architecture named in config.json.

    Raises:
        InputError: none is known.
    """
    architectures = list(hf_config.get("architectures") or [])
    for architecture in architectures:
        if architecture in _registered:
            return architecture, _registered[architecture]
        if architecture in _FAMILY_MODULES:
            return architecture, importlib.import_module(_FAMILY_MODULES[architecture]).FAMILY
    raise InputError(_unsupported(architectures, hf_config.get("model_type")))


def supported() -> list[str]:
    """Lists the architectures that can be run."""
    return sorted({*_FAMILY_MODULES, *_registered})


def _unsupported(architectures: list[str], model_type: object) -> str:
    named = ", ".join(architectures) or f"model_type {model_type!r} without `architectures`"
    near = [n for a in architectures for n in difflib.get_close_matches(a, supported(), n=3, cutoff=0.7)]
    nearest = (
        f"nearest to it are {', '.join(dict.fromkeys(near))}" if near else f"supported are {', '.join(supported())}"
    )
    return f"unsupported architecture: {named}; {nearest}; docs/adding-a-model.md says how to add one"
