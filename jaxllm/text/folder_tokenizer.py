"""Loads the tokenizer of a Hugging Face folder. Knows its file names and no model.

tokenizer.json is read directly; transformers is imported only where that file is missing.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxllm.config.errors import InputError
from jaxllm.text.tokenizer import Tokenizer

# From any of these transformers can make a tokenizer.
_OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json", "tiktoken.model")


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face folder.

    BOS and EOS are added as tokenizer.json's post-processor says; `add_bos_token` of tokenizer_config.json is ignored,
    as in transformers.

    Raises:
        InputError: there is no such folder or no tokenizer in it, or one of its files is broken.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: give one with a tokenizer.json, or set skip_tokenizer_init")
    config = _read_json(folder / "tokenizer_config.json")
    # transformers reads the older file only for folders written before the newer key.
    if "added_tokens_decoder" not in config:
        config |= _read_json(folder / "special_tokens_map.json")
    if (folder / "tokenizer.json").is_file():
        backend = _load_backend(folder / "tokenizer.json")
        _add_tokens(backend, folder, config)
    else:
        backend, defaults = _load_through_transformers(folder)
        config = {**defaults, **config}
    named = _special_tokens(config)
    templates = _chat_templates(folder, config)
    return Tokenizer(
        backend,
        special_tokens=named,
        eos_token_ids=_eos_token_ids(folder, backend, named.get("eos_token")),
        chat_template=templates.get("default"),
        tool_chat_template=templates.get("tool_use"),
        named_chat_templates=templates,
    )


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for any fault of the file
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}; download it again") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Adds tokens that only tokenizer_config.json has, or that it describes otherwise."""
    found = backend.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder", {})
    try:
        tokens = {int(token_id): AddedToken(**token) for token_id, token in listed.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is broken: {error}") from None
    backend.add_tokens(
        [token for token_id, token in sorted(tokens.items()) if repr(found.get(token_id)) != repr(token)]
    )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    named = [*_special_tokens(config).values(), *map(_content, extra if isinstance(extra, list) else extra.values())]
    backend.add_special_tokens([token for token in dict.fromkeys(named) if token and token not in known])


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Gives the tokens with a name, such as bos_token."""
    found = {name: _content(token) for name, token in config.items() if name.endswith("_token")}
    return {name: token for name, token in found.items() if token}


def _content(token: object) -> str | None:
    """Gives the token of an entry, which is a string or an object; other values (add_bos_token) are none."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Collects the templates by name; files win over tokenizer_config.json."""
    templates: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        templates["default"] = listed
    elif isinstance(listed, list):
        templates.update({entry["name"]: entry["template"] for entry in listed if {"name", "template"} <= entry.keys()})
    elif isinstance(listed, Mapping):
        templates.update(listed)
    files = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    files["default"] = folder / "chat_template.jinja"
    templates.update({name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()})
    return templates


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> list[int]:
    """Lists the tokenizer's own EOS first, then those of generation_config.json, or else of config.json."""
    generation = _read_json(folder / "generation_config.json")
    more = generation.get("eos_token_id", _read_json(folder / "config.json").get("eos_token_id"))
    more = more if isinstance(more, list) else [more]
    main = None if eos_token is None else backend.token_to_id(eos_token)
    return [token_id for token_id in (main, *more) if isinstance(token_id, int)]


def _load_through_transformers(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Gives the tokenizer, and the named tokens that its class has by default."""
    present = [name for name in _OTHER_FILES if (folder / name).is_file()]
    if not present:
        raise InputError(
            f"{folder} has no tokenizer.json, nor any of {', '.join(_OTHER_FILES)}: "
            "add the model's tokenizer files, or set skip_tokenizer_init to work with token ids only"
        )
    from transformers import AutoTokenizer  # seconds to import

    try:
        loaded = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever its converters raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(
            f"{folder}: transformers makes no tokenizer of {', '.join(present)} ({reason:.300})"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise InputError(
            f"{folder} has only a tokenizer in Python ({type(loaded).__name__}): save it as tokenizer.json first, "
            "or set skip_tokenizer_init"
        )
    return backend, dict(loaded.special_tokens_map)


def _read_json(path: Path) -> dict[str, Any]:
    """Reads an object from a file; one that is missing is empty."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
