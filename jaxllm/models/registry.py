"""Architecture name -> family. Knows which families exist; each family is a small file in families/."""

import importlib
from collections.abc import Mapping

from jaxllm.config.errors import InputError
from jaxllm.models.family import Family

_FAMILY_MODULES = {
    "LlamaForCausalLM": "jaxllm.models.families.llama",
    "Gemma3ForCausalLM": "jaxllm.models.families.gemma3",
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
    named = ", ".join(architectures) or f"model_type {hf_config.get('model_type')!r} without `architectures`"
    known = ", ".join(sorted({*_FAMILY_MODULES, *_registered}))
    raise InputError(f"unsupported architecture: {named}; supported are {known}")
