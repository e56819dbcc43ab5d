"""The engine in the caller's own process and thread: a list of prompts in, a list of results out. Knows no HTTP."""

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from jaxllm.api.errors import RequestError
from jaxllm.api.outputs import RequestOutput
from jaxllm.api.prompts import Prompt, TokenizedPrompt, prompt_list, tokenize_prompt
from jaxllm.api.request_stream import RequestStream
from jaxllm.api.start import start_engine
from jaxllm.config.engine_args import engine_args
from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer


class LLM:
    """Generates for lists of prompts. Keyword arguments are vLLM's flags with underscores; see EngineArgs.

    Use it as a context manager, or call close(), to give the device's memory back. Calls from several threads take
    turns. The caller's other arrays and jax's configuration are left as they were.

    Raises:
        InputError: an unknown option, or a model or value that does not fit, in one line.
    """

    def __init__(self, model: str = "smollm2", **options: Any):
        self._built, self._tokenizer = start_engine(engine_args({"model": model, **options}))
        self._engine = self._built.engine
        self._numbers = itertools.count()
        self._turn = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt; results come in the order of the prompts.

        A prompt is text, a list of token ids, or {"prompt_token_ids": [...]}. One SamplingParams serves all prompts, or
        there is one for each. `priority`, lower first, counts with scheduling_policy="priority". Nothing runs unless
        every prompt can be accepted.

        Raises:
            InputError: a prompt that the model cannot take, with its index and the numbers.
            RequestError: a step raised; its requests are lost, with the cause.
        """
        tokenized = [tokenize_prompt(prompt, self._tokenizer) for prompt in prompt_list(prompts)]
        ranks = [0] * len(tokenized) if priority is None else list(priority)
        if len(ranks) != len(tokenized):
            raise InputError(f"there are {len(tokenized)} prompts and {len(ranks)} priorities: give one each")
        return self._run(tokenized, self._params(sampling_params, len(tokenized)), use_tqdm, ranks)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, through the model's chat template.

        Raises:
            InputError: there is no tokenizer or template, a message is malformed, or see `generate`.
        """
        if self._tokenizer is None:
            raise InputError("chat needs a tokenizer, and skip_tokenizer_init is set")
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        tokenized = []
        for conversation in conversations:
            text = self._tokenizer.render_chat(conversation, add_generation_prompt, **template_kwargs)  # pyright: ignore[reportArgumentType]
            tokenized.append(TokenizedPrompt(self._tokenizer.encode(text, add_special_tokens=False), text))
        return self._run(tokenized, self._params(sampling_params, len(tokenized)), use_tqdm, [0] * len(tokenized))

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without sampling_params get: the defaults of the model's generation_config.json."""
        return SamplingParams(**self._built.sampling_defaults)

    def get_tokenizer(self) -> Tokenizer | None:
        """Gives the tokenizer, or None with skip_tokenizer_init."""
        return self._tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False while some of their blocks are in use."""
        with self._turn:
            return self._engine.reset_prefix_cache()

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model knows."""
        return self._engine.limits.vocab_size

    def report(self) -> list[tuple[str, str]]:
        """The start-up table: label and value."""
        return self._built.report()

    def close(self) -> None:
        """Frees the device's memory; the object is of no use afterwards."""
        self._built.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        return _params_list(self.get_default_sampling_params() if params is None else params, count)

    def _run(
        self, prompts: list[TokenizedPrompt], params: list[SamplingParams], use_tqdm: bool, ranks: list[int]
    ) -> list[RequestOutput]:
        with self._turn:
            for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                try:
                    self._engine.limits.check(prompt.token_ids, param)
                except ValueError as error:
                    raise InputError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
            streams = {}
            try:
                for prompt, param, rank in zip(prompts, params, ranks, strict=True):
                    stream = RequestStream(f"generate-{next(self._numbers)}", prompt, param, self._tokenizer)
                    self._engine.add(stream.request_id, prompt.token_ids, param, rank, prompt.cache_salt)
                    streams[stream.request_id] = stream
                self._drain(streams, use_tqdm)
            finally:
                for request_id, stream in streams.items():  # an interrupt or an error leaves nothing running
                    if not stream.finished:
                        self._engine.abort(request_id)
                while self._engine.has_work:
                    self._engine.step()
            return [stream.output() for stream in streams.values()]

    def _drain(self, streams: dict[str, RequestStream], use_tqdm: bool) -> None:
        num_tokens, failure = 0, None
        with tqdm(total=len(streams), desc="generating", unit=" requests", disable=None if use_tqdm else True) as bar:
            while self._engine.has_work:
                for update in self._engine.step():
                    stream = streams[update.request_id]
                    try:
                        num_tokens += len(stream.take(update).token_ids)
                    except RequestError as error:
                        failure = failure or error
                    if stream.stopped_by_text:
                        self._engine.abort(update.request_id)
                    if stream.finished:
                        bar.set_postfix_str(f"{num_tokens / (bar.format_dict['elapsed'] or 1.0):.0f} tok/s")
                        bar.update()
        if failure is not None:
            raise failure


def _params_list(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InputError(f"there are {count} prompts and {len(params)} sampling_params: give one, or one each")
    return list(params)
