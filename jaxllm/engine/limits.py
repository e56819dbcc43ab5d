"""What an engine refuses before a request is admitted. Knows numbers and names; no scheduling, no device."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxllm.config.errors import InputError
from jaxllm.config.logits_processor import LogitsProcessor
from jaxllm.config.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the engine checks a request against."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    has_priorities: bool = False  # the scheduling policy looks at a request's priority
    max_logprobs: int = 20  # -1 sets no limit
    max_running: int = 0  # requests that can run at once, on all data ranks; 0 where nobody said so
    processors: Mapping[str, LogitsProcessor] = field(default_factory=dict)

    def check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Refuses a request that the model cannot take.

        Raises:
            InputError: an empty prompt, one that leaves no room for output, token ids outside the vocabulary, more
                logprobs than allowed, or a logits processor that the engine does not have.
        """
        if not prompt_ids:
            raise InputError("the prompt is empty; it needs at least 1 token")
        if len(prompt_ids) >= self.max_model_len:
            raise InputError(
                f"the prompt has {len(prompt_ids):,} tokens, but max_model_len {self.max_model_len:,} leaves room for "
                f"{self.max_model_len - 1:,} and one output token: shorten the prompt or raise max_model_len"
            )
        self._check_ids("prompt", prompt_ids)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            self._check_ids(name, list(getattr(params, name) or ()))
        for word in params.bad_word_token_ids:
            self._check_ids("bad_words", list(word))
        if params.bad_words and not params.bad_word_token_ids:
            raise InputError("bad_words needs a tokenizer, and skip_tokenizer_init is set")
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(name, getattr(params, name))
        for name, given in (params.extra_args or {}).items():
            self._check_processor(name, given)

    def _check_ids(self, name: str, ids: list[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            place, wrong = next((i, token) for i, token in enumerate(ids) if not 0 <= token < self.vocab_size)
            raise InputError(
                f"{name}: token id {wrong} at position {place} is outside the vocabulary of {self.vocab_size:,}"
            )

    def _check_logprobs(self, name: str, wanted: int | None) -> None:
        if wanted is None or self.max_logprobs < 0:
            return
        if wanted < 0 or wanted > self.max_logprobs:
            asked = f"{name}=-1 asks for all {self.vocab_size:,}" if wanted < 0 else f"{name}={wanted}"
            raise InputError(
                f"{asked}, more than max_logprobs {self.max_logprobs}: ask for fewer or raise max_logprobs"
            )

    def _check_processor(self, name: str, given: object) -> None:
        if name not in self.processors:
            known = ", ".join(self.processors) or "none"
            raise InputError(f"extra_args: no logits processor {name!r}; the engine was started with {known}")
        try:
            self.processors[name].values(given)
        except InputError as error:
            raise InputError(f"extra_args[{name!r}]: {error}") from None
