"""Builds byte-level BPE from GGUF metadata (model `gpt2`). Knows how each family cuts text into words."""

from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from jaxllm.config.errors import InputError
from jaxllm.text.gguf_vocabulary import GGUFVocabulary

_CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+@"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*@"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_AND_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True, kw_only=True)
class WordSplit:
    """How text is cut into words before BPE, and what else goes with that choice.

    `regex` None is GPT-2's. `whole_words` takes a word that is a token as it is, whatever the merges say.
    """

    regex: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_GPT2 = WordSplit()
_DIGITS_THEN_GPT2 = WordSplit(single_digits=True)
_LLAMA3_REGEX = _WORD + r"|\p{N}{1,3}" + _MARKS + _SPACES
_LLAMA3 = WordSplit(regex=_LLAMA3_REGEX, whole_words=True, add_bos=True)
_QWEN2 = WordSplit(regex=_WORD + r"|\p{N}" + _MARKS + _SPACES, nfc=True)
_TEKKEN_REGEX = _CASED_WORD.replace("@", "") + r"|\p{N}" + _MARKS_AND_SLASH + _SPACES
_O200K_REGEX = _CASED_WORD.replace("@", _CONTRACTION + "?") + r"|\p{N}{1,3}" + _MARKS_AND_SLASH + _SPACES

# Names that llama.cpp writes; those of one line share a rule.
_WORD_SPLITS: dict[str, WordSplit] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder"), _DIGITS_THEN_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    "dbrx": WordSplit(regex=_LLAMA3_REGEX),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": WordSplit(regex=_TEKKEN_REGEX, whole_words=True, add_bos=True),
    "gpt-4o": WordSplit(regex=_O200K_REGEX),
}


def word_split(vocabulary: GGUFVocabulary) -> WordSplit:
    """Finds the rule that the metadata names.

    Raises:
        InputError: the name is not known.
    """
    name = vocabulary.fields.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in _WORD_SPLITS:
        raise InputError(
            f"the GGUF metadata tokenizer.ggml.pre is {name!r}, known are {', '.join(_WORD_SPLITS)}: "
            "use the model's Hugging Face folder instead"
        )
    return _WORD_SPLITS[name]


def build_byte_level(vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    """Builds the tokenizer without its added tokens.

    Raises:
        InputError: the word rule is not known, or a merge is malformed or needs a token that is not there.
    """
    split = word_split(vocabulary)
    token_ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    merges = [_merge(rank, text, token_ids) for rank, text in enumerate(vocabulary.merges)]
    backend = tokenizers.Tokenizer(models.BPE(token_ids, merges, ignore_merges=split.whole_words))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.regex:
        steps.append(pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _merge(rank: int, text: str, token_ids: dict[str, int]) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if not (left in token_ids and right in token_ids and left + right in token_ids):
        raise InputError(
            f"the GGUF metadata tokenizer.ggml.merges[{rank}] is {text!r:.60}, which needs a missing token"
        )
    return left, right
