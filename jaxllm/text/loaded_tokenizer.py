"""A tokenizer object that the caller's program has -> ours. Knows the libraries' objects by their shape; no files."""

from collections.abc import Mapping
from typing import Any

import tokenizers

from jaxllm.config.errors import InputError
from jaxllm.text.tokenizer import Tokenizer


def tokenizer_from_object(loaded: Any) -> Tokenizer:
    """Takes a Tokenizer of ours or of the tokenizers library, or a fast one of transformers.

    Raises:
        InputError: it is none of these.
    """
    if isinstance(loaded, Tokenizer):
        return loaded
    backend = loaded if isinstance(loaded, tokenizers.Tokenizer) else getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise InputError(
            "tokenizer must be a folder, a .gguf file, or a tokenizer of jaxllm, tokenizers or transformers (a fast "
            f"one), got {type(loaded).__name__}"
        )
    templates = getattr(loaded, "chat_template", None) or {}
    templates = dict(templates) if isinstance(templates, Mapping) else {"default": templates}
    named = {name: token for name, token in getattr(loaded, "special_tokens_map", {}).items() if isinstance(token, str)}
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return Tokenizer(
        backend,
        special_tokens=named,
        eos_token_ids=() if eos is None else (eos,),
        chat_template=templates.get("default"),
        tool_chat_template=templates.get("tool_use"),
        named_chat_templates=templates,
    )
