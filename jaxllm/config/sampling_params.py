"""What a request asks of the sampler and of the stop rules. Knows no tokenizer, no model and no device."""

import dataclasses
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.config.errors import InputError

MAX_LOGPROB_TOKEN_IDS = 128

# Named by vLLM, refused until built: a value other than the default must never be accepted in silence.
_NOT_BUILT: dict[str, object] = {
    "structured_outputs": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "spaces_between_special_tokens": True,
}


class RequestOutputKind(enum.Enum):
    """What each output of an iteration holds: all so far, what came new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop rules of one request, with vLLM's names and defaults.

    temperature 0 is greedy. top_k 0 or -1 keeps every token; top_p 1 and min_p 0 likewise. A request without a seed
    draws one when it is admitted; sample i of n > 1 has the seed + i. `stop` strings end the text before their first
    occurrence, or behind it with `include_stop_str_in_output`. logprobs and prompt_logprobs ask for the k best tokens
    beside the one that stands there, -1 for the whole vocabulary. docs/python-api.md explains each field.

    Raises:
        InputError: a value out of range, or a field whose feature is not built yet.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int = 0
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False

    structured_outputs: object | None = None
    thinking_token_budget: int | None = None
    repetition_detection: object | None = None
    spaces_between_special_tokens: bool = True

    # bad_words in token ids, each spelling of each word; filled in by whoever has the tokenizer.
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, default in _NOT_BUILT.items():
            if getattr(self, name) not in (default, [], {}):
                raise InputError(f"{name}={getattr(self, name)!r} is not supported yet; leave it at {default!r}")
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self._check_numbers()
        self._check_stops()
        self._check_logprobs()
        self._check_edits()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def replace(self, **changes: object) -> "SamplingParams":
        """Gives a checked copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def _check_numbers(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"{name} must be a number, got {value!r}")
            if not low <= value <= high or not math.isfinite(value) or (value == 0 and name in _ABOVE_ZERO):
                raise InputError(f"{name} must {_RANGE_NAMES.get(name) or 'be ' + _range(low, high)}, got {value}")
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(f"{name} must be an integer, got {value!r}")
            if not low <= value <= high:
                raise InputError(f"{name} must {_RANGE_NAMES.get(name) or 'be ' + _range(low, high)}, got {value}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}: lower it")
        if self.n > 1 and self.greedy:
            raise InputError(f"n must be 1 with temperature 0, got {self.n}: greedy samples would all be equal")

    def _check_stops(self) -> None:
        if not all(isinstance(text, str) and text for text in self.stop or ()):
            raise InputError(f"stop must be non-empty strings, got {self.stop!r}")
        if not _are_integers(self.stop_token_ids or ()):
            raise InputError(f"stop_token_ids must be integers, got {self.stop_token_ids!r}")
        if self.stop and not self.detokenize:
            raise InputError("stop strings need detokenize=True; use stop_token_ids instead")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InputError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")

    def _check_logprobs(self) -> None:
        ids = self.logprob_token_ids
        if ids is None:
            return
        if not isinstance(ids, list | tuple) or not _are_integers(ids):
            raise InputError(f"logprob_token_ids must be a list of integers, got {ids!r:.80}")
        if len(ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InputError(f"logprob_token_ids may have {MAX_LOGPROB_TOKEN_IDS} ids, got {len(ids)}")
        self.logprob_token_ids = list(ids) or None

    def _check_edits(self) -> None:
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise InputError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r:.80}")
            try:  # JSON has no integer keys
                self.logit_bias = {int(token): float(bias) for token, bias in self.logit_bias.items()}
            except (TypeError, ValueError):
                raise InputError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r:.80}") from None
            wrong = [bias for bias in self.logit_bias.values() if not -100 <= bias <= 100]
            if wrong:
                raise InputError(f"logit_bias must be from -100 to 100, got {wrong[0]}")
        allowed = self.allowed_token_ids
        if allowed is not None and not (isinstance(allowed, list | tuple) and allowed and _are_integers(allowed)):
            raise InputError(f"allowed_token_ids must be a non-empty list of integers, got {allowed!r:.80}")
        words = self.bad_words or []
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) and word for word in words):
            raise InputError(f"bad_words must be non-empty strings, got {words!r:.80}")
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise InputError(f"extra_args must be a dictionary, got {self.extra_args!r:.80}")


@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    """What a beam search asks for, with vLLM's names. A beam's score is its log-probability / length^length_penalty.

    Raises:
        InputError: a value out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be an integer of at least 1, got {value!r}")
        if not 0.0 <= self.temperature < math.inf:
            raise InputError(f"temperature must be at least 0, got {self.temperature}")
        if not math.isfinite(self.length_penalty):
            raise InputError(f"length_penalty must be a number, got {self.length_penalty}")


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, math.inf),
}
_INTEGERS: dict[str, tuple[float, float]] = {
    "n": (1, 16384),
    "top_k": (-1, 2**31 - 1),  # the device has 32 bits for it
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (1, math.inf),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (-1, math.inf),
    "prompt_logprobs": (-1, math.inf),
    "prompt_logprob_start": (0, 2**31 - 1),
}
_OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_ABOVE_ZERO = ("top_p", "repetition_penalty")
_RANGE_NAMES = {
    "top_p": "be in (0, 1]",
    "repetition_penalty": "be above 0",
    "top_k": "be -1 or 0 (off), or from 1 to 2,147,483,647",
    "seed": "fit in 64 bits",
    "logprobs": "be -1 (the whole vocabulary) or at least 0",
    "prompt_logprobs": "be -1 (the whole vocabulary) or at least 0",
}


def _range(low: float, high: float) -> str:
    return f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:,}"


def _are_integers(values: Sequence[object]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)
