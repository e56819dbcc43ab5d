"""One model's tokenizer as its users hold it. Knows no file format and no request."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from jaxllm.config.errors import InputError
from jaxllm.text.chat_template import render_chat
from jaxllm.text.token_stream import TokenStream, decoder_kind, make_stream


class Tokenizer:
    """Text to token ids and back, with the names of Hugging Face where they have one.

    `special_tokens` maps the names that chat templates use, such as "bos_token", to tokens. `eos_token_ids` starts with
    the main one. `tool_chat_template` replaces `chat_template` for requests with tools, where a model has two; of
    `named_chat_templates` a caller may choose one by its name.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        tool_chat_template: str | None = None,
        named_chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.chat_template = chat_template
        self.tool_chat_template = tool_chat_template
        self.named_chat_templates = dict(named_chat_templates or {})
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        self._new_stream = make_stream(decoder, backend.id_to_token, self._decode_all)
        self._falls_back_to_bytes = decoder_kind(decoder)[0] == "ByteFallback"

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def bos_token(self) -> str | None:
        """The token that starts a text, or None."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The main token that ends a text, or None."""
        return self.id_to_token(self.eos_token_ids[0]) if self.eos_token_ids else None

    @property
    def bos_token_id(self) -> int | None:
        """The id of `bos_token`, or None."""
        return None if self.bos_token is None else self.token_to_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """The first of `eos_token_ids`, or None."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def token_to_id(self, token: str) -> int | None:
        """Gives the id of a token, or None."""
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Gives the token as the vocabulary spells it, or None."""
        return self.backend.id_to_token(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turns text into token ids; special tokens written in the text are recognised.

        Raises:
            InputError: `text` is not a string, or no valid Unicode.
        """
        _check_text(text)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Turns several texts into token ids, on all cores.

        Raises:
            InputError: one of them is not a string, or no valid Unicode.
        """
        if isinstance(texts, str):
            raise InputError("encode_batch takes a list of texts, got one string; use encode")
        for text in texts:
            _check_text(text)
        return [
            encoding.ids for encoding in self.backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        ]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Turns token ids into text; ids outside the vocabulary have none.

        Where byte tokens form no valid UTF-8, each of the offending bytes becomes U+FFFD, as in SentencePiece. (The
        `tokenizers` library drops the whole run of byte tokens then, which text sent as it comes cannot follow.)

        Raises:
            InputError: an id is negative or no integer.
        """
        ids = list(token_ids)
        try:
            text = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            wrong = next((i for i in ids if not isinstance(i, int) or not 0 <= i < 2**32), ids)
            raise InputError(f"token ids must be integers from 0 to {self.vocab_size - 1}, got {wrong!r:.40}") from None
        if not self._falls_back_to_bytes or "\ufffd" not in text:
            return text
        stream = self.stream()
        if skip_special_tokens:
            ids = [token_id for token_id in ids if token_id not in self.special_token_ids]
        return stream.push(ids) + stream.flush()

    def stream(self) -> TokenStream:
        """Gives a decoder for tokens that come one after the other; it skips no special token."""
        return self._new_stream()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> str:
        """Renders messages through the chat template; other keywords are variables of the template.

        `chat_template` is another template, or the name of one that the model has.

        Raises:
            InputError: there is no template, a message is malformed, or the template refuses it.
        """
        template = self.named_chat_templates.get(chat_template or "", chat_template)
        template = template or (self.tool_chat_template if tools else None) or self.chat_template
        if template is None:
            raise InputError("this model has no chat template: give one with --chat-template, or send a plain prompt")
        return render_chat(
            template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**self.special_tokens, **kwargs},
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> list[int]:
        """Gives the token ids of `render_chat`; the template writes BOS itself, so none is added.

        Raises:
            InputError: as `render_chat`.
        """
        text = self.render_chat(
            messages,
            add_generation_prompt,
            tools,
            chat_template=chat_template,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        return self.encode(text, add_special_tokens=False)

    def _decode_all(self, token_ids: list[int]) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=False)


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InputError(f"the text to encode must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X}"
        raise InputError(f"the text is no valid Unicode: a lone surrogate {found} at character {error.start}") from None
