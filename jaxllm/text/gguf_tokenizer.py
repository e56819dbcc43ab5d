"""Builds the tokenizer of a GGUF file from its metadata. Knows no file: it takes plain values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import tokenizers
from tokenizers import AddedToken, processors

from jaxllm.config.errors import InputError
from jaxllm.text.gguf_byte_level import build_byte_level, word_rule
from jaxllm.text.gguf_ends import end_token_ids
from jaxllm.text.gguf_sentencepiece import build_sentencepiece
from jaxllm.text.gguf_vocabulary import GGUFVocabulary, TokenType, read_vocabulary
from jaxllm.text.tokenizer import Tokenizer

_TEMPLATE = "tokenizer.chat_template"
# Of Phi-3's added tokens only these keep the white space that follows them.
_PHI3_KEEPING = frozenset({"<unk>", "<s>", "<|endoftext|>"})


@dataclass(frozen=True, slots=True)
class _Model:
    """How the tokenizer of one `tokenizer.ggml.model` is built, and whether it adds BOS unless told."""

    build: Callable[[GGUFVocabulary], tokenizers.Tokenizer]
    adds_bos: Callable[[GGUFVocabulary], bool]


_MODELS = {
    "gpt2": _Model(build_byte_level, lambda vocabulary: word_rule(vocabulary).add_bos),
    "llama": _Model(build_sentencepiece, lambda vocabulary: True),
}


def tokenizer_from_gguf(fields: Mapping[str, object]) -> Tokenizer:
    """Builds the tokenizer that GGUF metadata describes.

    Raises:
        InputError: the metadata has no tokenizer, one of an unknown kind, or one that contradicts itself.
    """
    name = fields.get("tokenizer.ggml.model")
    model = _MODELS.get(name) if isinstance(name, str) else None
    if model is None:
        raise InputError(
            f"the GGUF metadata tokenizer.ggml.model is {name!r}, known are {', '.join(_MODELS)}: "
            "use the model's Hugging Face folder instead, or set skip_tokenizer_init"
        )
    vocabulary = _with_plain_spaces(read_vocabulary(fields))
    backend = model.build(vocabulary)
    ends = end_token_ids(vocabulary)
    _add_tokens(backend, vocabulary, ends)
    _add_ends(backend, vocabulary, model.adds_bos(vocabulary))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special_tokens = {name: vocabulary.token_of(field) for name, field in names.items()}
    templates = _chat_templates(fields)
    return Tokenizer(
        backend,
        special_tokens={name: token for name, token in special_tokens.items() if token is not None},
        eos_token_ids=ends,
        chat_template=templates.get("default"),
        tool_chat_template=templates.get("tool_use"),
        named_chat_templates=templates,
    )


def _with_plain_spaces(vocabulary: GGUFVocabulary) -> GGUFVocabulary:
    """Spells user-defined tokens as they stand in a text, which is searched for them before spaces are marked."""
    ids = [i for i in vocabulary.ids_of(TokenType.USER_DEFINED) if "▁" in vocabulary.tokens[i]]
    if not ids or vocabulary.fields.get("tokenizer.ggml.model") != "llama":
        return vocabulary
    tokens = list(vocabulary.tokens)
    taken = set(tokens)
    for token_id in ids:
        spelled = tokens[token_id].replace("▁", " ")
        tokens[token_id] = tokens[token_id] if spelled in taken else spelled
    return replace(vocabulary, tokens=tokens)


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: GGUFVocabulary, ends: list[int]) -> None:
    """Has the tokens recognised that BPE must not make: control tokens (special) and user-defined ones (plain text)."""
    special = {*vocabulary.ids_of(TokenType.CONTROL), *vocabulary.ids_of(TokenType.UNKNOWN), *ends}
    special.update(i for i in (vocabulary.token_id("bos"),) if i is not None)
    plain = set(vocabulary.ids_of(TokenType.USER_DEFINED)) - special
    fields = vocabulary.fields
    is_phi3 = fields.get("general.architecture") == "phi3" and fields.get("tokenizer.ggml.model") == "llama"
    backend.add_tokens(
        [
            AddedToken(
                vocabulary.tokens[token_id],
                normalized=False,
                special=token_id in special,
                rstrip=is_phi3 and vocabulary.tokens[token_id] not in _PHI3_KEEPING,
            )
            for token_id in sorted(special | plain)
        ]
    )


def _add_ends(backend: tokenizers.Tokenizer, vocabulary: GGUFVocabulary, bos_by_default: bool) -> None:
    """Has `encode` put BOS in front and EOS behind, each if the metadata says so."""
    has_bos = vocabulary.token_id("bos") is not None
    wanted = {
        "bos": vocabulary.flag("add_bos_token", default=bos_by_default and has_bos),
        "eos": vocabulary.flag("add_eos_token", default=False),
    }
    for name, add in wanted.items():
        if add and vocabulary.token_id(name) is None:
            raise InputError(
                f"the GGUF metadata has tokenizer.ggml.add_{name}_token = true but no tokenizer.ggml.{name}_token_id: "
                "convert the model again"
            )
    ends = {name: (vocabulary.token_of(name), vocabulary.token_id(name)) for name, add in wanted.items() if add}
    if not ends:
        return
    backend.post_processor = processors.TemplateProcessing(
        single=[part for part in ("bos", "$A", "eos") if part == "$A" or part in ends],
        special_tokens=[{"id": name, "ids": [ids], "tokens": [token]} for name, (token, ids) in ends.items()],
    )


def _chat_templates(fields: Mapping[str, object]) -> dict[str, str]:
    """Collects the templates by name; the one without a name is the default."""
    templates: dict[str, str] = {}
    for key, template in fields.items():
        if key != _TEMPLATE and not key.startswith(f"{_TEMPLATE}."):
            continue
        if not isinstance(template, str):
            raise InputError(f"the GGUF metadata {key} must be a string, got {type(template).__name__}")
        if template:
            templates[key.removeprefix(_TEMPLATE).removeprefix(".") or "default"] = template
    return templates
