"""How each family of byte-level tokenizers cuts text into words before BPE. Knows llama.cpp's names, no vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from jaxllm.config.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class WordRule:
    """How text is cut into words, and what else goes with that choice.

    Each step cuts the words of the one before; one of them spells bytes as characters. `whole_words` takes a word that
    is a token as it is, whatever the merges say. `nfc` composes accents first.
    """

    steps: tuple[Callable[[], PreTokenizer], ...]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def build(self) -> PreTokenizer:
        """Gives the cutter; compiling its patterns takes milliseconds."""
        return pre_tokenizers.Sequence([step() for step in self.steps])


def find_word_rule(name: object) -> WordRule:
    """Finds the rule of this `tokenizer.ggml.pre`; None is that of files written before the key was.

    Raises:
        InputError: the name is not known.
    """
    rule = _RULES.get(name) if isinstance(name, str) else _DEFAULT if name is None else None
    if rule is None:
        raise InputError(
            f"the GGUF metadata tokenizer.ggml.pre is {name!r:.40}, known are {', '.join(_RULES)}: "
            "use the model's Hugging Face folder instead"
        )
    return rule


def _isolate(pattern: str) -> Callable[[], PreTokenizer]:
    """A step that makes each match a word, and each rest between two."""
    return lambda: pre_tokenizers.Split(Regex(pattern), behavior="isolated")


_BYTES = partial(pre_tokenizers.ByteLevel, add_prefix_space=False, use_regex=False)
_GPT2_WORDS = partial(pre_tokenizers.ByteLevel, add_prefix_space=False, use_regex=True)
_SINGLE_DIGITS = partial(pre_tokenizers.Digits, individual_digits=True)

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_CAMEL_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+@"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*@"
)
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_AND_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3_STEPS = (_isolate(_WORD + r"|\p{N}{1,3}" + _MARKS + _SPACES), _BYTES)
_GPT2 = WordRule(steps=(_GPT2_WORDS,))
_DIGITS_THEN_GPT2 = WordRule(steps=(_SINGLE_DIGITS, _GPT2_WORDS))
_LLAMA3 = WordRule(steps=_LLAMA3_STEPS, whole_words=True, add_bos=True)
_CL100K = WordRule(steps=_LLAMA3_STEPS)
_QWEN2 = WordRule(steps=(_isolate(_WORD + r"|\p{N}" + _MARKS + _SPACES), _BYTES), nfc=True)
_O200K = WordRule(
    steps=(
        _isolate(_CAMEL_WORD.replace("@", _CONTRACTION + "?") + r"|\p{N}{1,3}" + _MARKS_AND_SLASH + _SPACES),
        _BYTES,
    )
)
_TEKKEN = WordRule(
    steps=(_isolate(_CAMEL_WORD.replace("@", "") + r"|\p{N}" + _MARKS_AND_SLASH + _SPACES), _BYTES),
    whole_words=True,
    add_bos=True,
)
_DEEPSEEK_V3 = WordRule(
    steps=(
        _isolate(r"\p{N}{1,3}"),
        _isolate(r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"),
        _isolate(r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES),
        _BYTES,
    )
)
_FALCON = WordRule(
    steps=(
        partial(pre_tokenizers.Punctuation, behavior="contiguous"),
        _GPT2_WORDS,
        # On spelled bytes: as Falcon's own tokenizer, these cut at bytes whose character is a numeral, such as 0xBC.
        partial(pre_tokenizers.Digits, individual_digits=False),
        _isolate("[0-9][0-9][0-9]"),
    )
)
# What llama.cpp does with a file that names no rule.
_DEFAULT = WordRule(
    steps=(
        _isolate(r"[\p{P}$+<=>^~|]+"),
        _isolate(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
        _isolate(r"\p{N}+"),
        _isolate("[0-9][0-9][0-9]"),
        _BYTES,
    )
)

# The names that llama.cpp writes.
_RULES: dict[str, WordRule] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2"), _GPT2),
    "olmo": WordRule(steps=(_GPT2_WORDS,), nfc=True),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS_THEN_GPT2),
    "command-r": WordRule(steps=_DIGITS_THEN_GPT2.steps, nfc=True),
    "falcon": _FALCON,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "deepseek-v3": _DEEPSEEK_V3,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
}
