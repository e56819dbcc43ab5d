"""What happens to a request before the engine sees it: text to ids, parameters completed and checked. Runs nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.api.metrics import Metric, RequestBooks
from jaxllm.api.prompts import Prompt, TokenizedPrompt, tokenize_prompt
from jaxllm.api.request_stream import RequestStream
from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.limits import EngineLimits
from jaxllm.engine.messages import EngineStats
from jaxllm.text.bad_words import with_bad_word_ids
from jaxllm.text.token_texts import TokenTexts
from jaxllm.text.tokenizer import Tokenizer

type Messages = Sequence[Mapping[str, Any]]


class Front:
    """The text side of one engine, and the books of its requests. Shared by all threads that call it."""

    def __init__(self, tokenizer: Tokenizer | None, limits: EngineLimits, model_name: str):
        self.tokenizer = tokenizer
        self.limits = limits
        self.model_name = model_name
        self.books = RequestBooks(limits.max_model_len)
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)

    def tokenize(self, prompt: Prompt | TokenizedPrompt) -> TokenizedPrompt:
        """Takes any form of a prompt.

        Raises:
            InputError: see `tokenize_prompt`.
        """
        return prompt if isinstance(prompt, TokenizedPrompt) else tokenize_prompt(prompt, self.tokenizer)

    def render(self, conversation: Messages, **options: Any) -> TokenizedPrompt:
        """Writes a conversation as the model reads it; options are those of Tokenizer.render_chat.

        Raises:
            InputError: there is no tokenizer or template, or a message is malformed.
        """
        if self.tokenizer is None:
            raise InputError("chat needs a tokenizer, and skip_tokenizer_init is set")
        text = self.tokenizer.render_chat(conversation, **options)
        return TokenizedPrompt(self.tokenizer.encode(text, add_special_tokens=False), text)

    def check(self, prompt: TokenizedPrompt, params: SamplingParams) -> SamplingParams:
        """Gives the parameters as the engine takes them.

        Raises:
            InputError: the model cannot take the request.
        """
        params = with_bad_word_ids(params, self.tokenizer)
        self.limits.check(prompt.token_ids, params)
        return params

    def open(self, request_id: str, prompt: TokenizedPrompt, params: SamplingParams) -> RequestStream:
        """Begins to follow a checked request; it counts as arrived."""
        meter = self.books.start(len(prompt.token_ids), params)
        return RequestStream(request_id, prompt, params, self.tokenizer, self._texts, meter)

    def metrics(self, stats: EngineStats) -> list[Metric]:
        """Reads the books, and the engine's statistics beside them."""
        return self.books.read(self.model_name, stats)


def refuse_lora(lora_request: object | None) -> None:
    """Refuses an adapter: the argument is there for callers of vLLM's.

    Raises:
        InputError: there is one.
    """
    if lora_request is not None:
        raise InputError(f"lora_request={lora_request!r:.60} is not supported yet; leave it at None")
