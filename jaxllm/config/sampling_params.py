"""What a request asks of the sampler and of the stop rules. Knows no tokenizer, no model and no device."""

import dataclasses
from dataclasses import dataclass

from jaxllm.config.errors import InputError

# Named by vLLM, refused until built: a value other than the default must never be accepted in silence.
_NOT_BUILT: dict[str, object] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
    "extra_args": None,
}


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop rules of one request, with vLLM's names and defaults.

    temperature 0 is greedy. top_k 0 or -1 keeps every token; top_p 1 likewise. A request without a seed draws one when
    it is admitted. `stop` strings end the text before their first occurrence, or behind it with
    `include_stop_str_in_output`.

    Raises:
        InputError: a value out of range, or a field whose feature is not built yet.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    skip_special_tokens: bool = True
    detokenize: bool = True

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: object | None = None
    extra_args: dict | None = None

    def __post_init__(self) -> None:
        for name, default in _NOT_BUILT.items():
            if getattr(self, name) not in (default, [], {}):
                raise InputError(f"{name}={getattr(self, name)!r} is not supported yet; leave it at {default!r}")
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self._check_numbers()
        self._check_stops()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def replace(self, **changes: object) -> "SamplingParams":
        """Gives a checked copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def _check_numbers(self) -> None:
        for name in ("temperature", "top_p"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int | float):
                raise InputError(f"{name} must be a number, got {getattr(self, name)!r}")
        for name in ("top_k", "seed", "max_tokens"):
            value = getattr(self, name)
            if value is None and name != "top_k":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(f"{name} must be an integer, got {value!r}")
        if not 0.0 <= self.temperature < float("inf"):
            raise InputError(f"temperature must be at least 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise InputError(f"top_k must be -1 or 0 (off) or at least 1, got {self.top_k}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InputError(f"seed must fit in 64 bits, got {self.seed}")

    def _check_stops(self) -> None:
        if not all(isinstance(text, str) and text for text in self.stop or ()):
            raise InputError(f"stop must be non-empty strings, got {self.stop!r}")
        if not all(isinstance(token, int) for token in self.stop_token_ids or ()):
            raise InputError(f"stop_token_ids must be integers, got {self.stop_token_ids!r}")
        if self.stop and not self.detokenize:
            raise InputError("stop strings need detokenize=True; use stop_token_ids instead")
