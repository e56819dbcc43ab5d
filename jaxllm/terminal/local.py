"""A model in this process that answers at a terminal. Knows AsyncLLM; no terminal."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from jaxllm.api.async_llm import AsyncLLM
from jaxllm.api.errors import EngineDeadError, RequestError
from jaxllm.api.prompts import Prompt
from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.terminal.answers import AnswerLost, Message, Write
from jaxllm.terminal.args import CompleteArgs


class LocalModel:
    """Runs an engine for one person, one answer at a time."""

    def __init__(self, engine: EngineArgs, args: CompleteArgs):
        self.name = engine.model
        self._sampling = args.sampling()
        self._llm = AsyncLLM.from_engine_args(engine)
        self._loop = asyncio.Runner()

    def chat(self, messages: Sequence[Message], write: Write) -> None:
        """Answers through the model's chat template, with as many tokens as the context leaves.

        Raises:
            InputError: the model has no chat template, or the conversation is too long.
        """
        tokenizer = self._llm.get_tokenizer()
        if tokenizer is None:
            raise InputError("chat needs a tokenizer, and skip_tokenizer_init is set")
        ids = tokenizer.apply_chat_template(messages)
        self._answer(
            {"prompt_token_ids": ids},
            SamplingParams(**{"max_tokens": None, **self._llm.sampling_defaults, **self._sampling}),
            write,
        )

    def complete(self, prompt: str, write: Write) -> None:
        """Continues a text.

        Raises:
            InputError: the text is too long.
        """
        self._answer(prompt, SamplingParams(**{**self._llm.sampling_defaults, **self._sampling}), write)

    def close(self) -> None:
        self._loop.close()
        self._llm.shutdown()

    def _answer(self, prompt: Prompt, params: SamplingParams, write: Write) -> None:
        try:
            # On Ctrl-C the runner cancels the task, which aborts the request, and raises KeyboardInterrupt here.
            self._loop.run(self._stream(prompt, params, write))
        except (RequestError, EngineDeadError) as error:
            raise AnswerLost(str(error)) from None

    async def _stream(self, prompt: Prompt, params: SamplingParams, write: Write) -> None:
        async with aclosing(self._llm.stream(prompt, params)) as deltas:
            async for delta in deltas:
                write(delta.text)
