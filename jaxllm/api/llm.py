"""The engine in the caller's own process and thread: a list of prompts in, a list of results out. Knows no HTTP."""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jax.sharding import Mesh

from jaxllm.api.beam_search import search_beams
from jaxllm.api.driver import EngineDriver, Follower
from jaxllm.api.front import Front, Messages, refuse_lora
from jaxllm.api.metrics import Metric
from jaxllm.api.outputs import BeamSearchOutput, ContinuationScore, RequestOutput
from jaxllm.api.progress import Progress, UseTqdm, progress
from jaxllm.api.prompts import Prompt, TokenizedPrompt, prompt_list
from jaxllm.api.request_stream import RequestStream
from jaxllm.api.scoring import SCORED, Continuation, ScoreStream, join, pair_with
from jaxllm.api.start import ModelLike, TokenizerLike, start
from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxllm.engine.engine import KVMode
from jaxllm.engine.loop import read_stats
from jaxllm.mesh.axes import AxisRules
from jaxllm.models.config import ModelConfig
from jaxllm.models.dense import make_dense_logits
from jaxllm.models.forward import build_program
from jaxllm.models.given import collect
from jaxllm.scheduler.request import WeightVersion
from jaxllm.text.tokenizer import Tokenizer

_MOST_SCORED = 1024  # requests that `score` keeps in the engine at once, which holds their scores until they end

type Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """Generates for lists of prompts. Keyword arguments are vLLM's flags with underscores; see EngineArgs.

    Use it as a context manager, or call close(), to give the device's memory back. Calls from several threads take
    turns. The caller's other arrays and jax's configuration are left as they were.

    `model` may be a Decoder or a pair (ModelConfig, weights) of this program, whose arrays are used as they are, and
    `tokenizer` an object. With `mesh` the engine runs on the devices of a mesh of this program, and `axis_rules` says
    in that mesh's names which axes split what; without, those called data and tensor do.

    Raises:
        InputError: an unknown option, or a model or value that does not fit, in one line.
    """

    def __init__(
        self,
        model: ModelLike = "smollm2",
        *,
        tokenizer: TokenizerLike = None,
        mesh: Mesh | None = None,
        axis_rules: AxisRules | None = None,
        **options: Any,
    ):
        started = start(model, options, tokenizer=tokenizer, mesh=mesh, axis_rules=axis_rules)
        self._built, self._tokenizer = started.built, started.tokenizer
        self._engine = self._built.engine
        self._front = Front(started.tokenizer, self._engine.limits, started.model_name)
        self._driver = EngineDriver(self._engine, self._front.books.take_step)
        self._numbers = itertools.count()
        self._enqueued: list[RequestStream] = []
        self._turn = threading.RLock()  # a function given to apply_model may call back

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt; results come in the order of the prompts.

        A prompt is text, a list of token ids, or {"prompt_token_ids": [...]}. One SamplingParams serves all prompts, or
        there is one for each. `priority`, lower first, counts with scheduling_policy="priority". Nothing runs unless
        every prompt can be accepted. `use_tqdm` may be a function that makes the bar.

        Raises:
            InputError: a prompt that the model cannot take, with its index and the numbers.
            RequestError: a step raised; its requests are lost, with the cause.
        """
        refuse_lora(lora_request)
        return self._answer(self._tokenized(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, through the model's chat template.

        `tools` are JSON schemas that the template shows to the model. Variables of the template come in
        `chat_template_kwargs` or as further keywords.

        Raises:
            InputError: there is no tokenizer or template, a message is malformed, or see `generate`.
        """
        refuse_lora(lora_request)
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "tools": tools,
        }
        prompts = self._rendered(messages, {**options, **(chat_template_kwargs or {}), **template_kwargs})
        return self._answer(prompts, sampling_params, use_tqdm, priority)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[str]:
        """Admits prompts and returns at once with their request ids; `wait_for_completion` runs them.

        Raises:
            InputError: see `generate`.
        """
        refuse_lora(lora_request)
        return self._enqueue(self._tokenized(prompts), sampling_params, priority)

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        **chat_options: Any,
    ) -> list[str]:
        """Does for conversations what `enqueue` does for prompts; other options are those of `chat`.

        Raises:
            InputError: see `chat`.
        """
        refuse_lora(lora_request)
        variables = chat_options.pop("chat_template_kwargs", None) or {}
        return self._enqueue(self._rendered(messages, {**chat_options, **variables}), sampling_params, priority)

    def wait_for_completion(self, use_tqdm: UseTqdm = True) -> list[RequestOutput]:
        """Runs all that was enqueued since the last call; results come in the order in which it was.

        Raises:
            RequestError: a step raised; its requests are lost, with the cause.
        """
        with self._turn:
            streams, self._enqueued = self._enqueued, []
            with progress(use_tqdm, len(streams), "generating") as bar:
                self._run(streams, bar)
            return [stream.output() for stream in streams]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: UseTqdm = False,
    ) -> list[BeamSearchOutput]:
        """Finds the continuations of highest score, `beam_width` for each prompt, best first.

        Raises:
            InputError: a prompt that the model cannot take, or a width beyond max_logprobs / 2.
            RequestError: a step raised; its requests are lost, with the cause.
        """
        refuse_lora(lora_request)
        tokenized = self._tokenized(prompts)
        limits = self._engine.limits
        with progress(use_tqdm, len(tokenized), "beam search") as bar:
            searches = search_beams(tokenized, params, limits, lambda p, one: self._answer(p, one, False), bar.end_one)
        return [search.result(self._tokenizer) for search in searches]

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Continuation | Sequence[Continuation],
        use_tqdm: UseTqdm = False,
    ) -> list[ContinuationScore]:
        """Gives the log-probability of each token of given continuations behind their prompts.

        Both are text or token ids; there is one prompt for all continuations, or one for each. Prompt and continuation
        together must leave room for one more token.

        Raises:
            InputError: one of them is empty or too long, with its index and the numbers.
            RequestError: a step raised; its requests are lost, with the cause.
        """
        pairs = pair_with(prompt_list(prompts), prompt_list(continuations))  # pyright: ignore[reportArgumentType]
        joined = []
        for index, (prompt, continuation) in enumerate(pairs):
            with _naming("continuation", index, len(pairs)):
                joined.append(join(prompt, continuation, self._tokenizer))
                self._front.check(joined[-1].prompt(), SCORED)
        scores: list[ContinuationScore] = []
        with progress(use_tqdm, len(joined), "scoring") as bar:
            for window in itertools.batched(joined, _MOST_SCORED):
                streams = [ScoreStream(self._next_id("score"), each) for each in window]
                with self._turn:
                    self._run(streams, bar, [0] * len(streams))
                scores += [stream.score for stream in streams]
        return scores

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without sampling_params get: the defaults of the model's generation_config.json."""
        return SamplingParams(**self._built.sampling_defaults)

    def get_tokenizer(self) -> Tokenizer | None:
        """Gives the tokenizer, or None with skip_tokenizer_init."""
        return self._tokenizer

    def get_metrics(self) -> list[Metric]:
        """Reads the metrics of docs/metrics.md: Counter, Gauge, Vector or Histogram, each with its name and labels."""
        with self._turn:
            return self._front.metrics(read_stats(self._engine))

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False while some of their blocks are in use."""
        with self._turn:
            return self._engine.reset_prefix_cache()

    def start_profile(self, directory: str = "profile") -> None:
        """Begins a trace of jax's profiler, written to a directory when it stops.

        Raises:
            InputError: one runs already.
        """
        with self._turn:
            self._engine.start_profile(directory)

    def stop_profile(self) -> None:
        """Ends the trace and writes it.

        Raises:
            InputError: none runs.
        """
        with self._turn:
            self._engine.stop_profile()

    def apply_model[T](self, function: Callable[[Any], T]) -> T:
        """Calls a function with the weights, a tree of jax arrays, and gives what it returns."""
        with self._turn:
            return function(self._engine.weights)

    def make_logits(self) -> Callable:
        """Gives logits(weights, token [B, S]) -> float32 logits [B, S, V] of the token behind each: the same model,
        without a cache and differentiable, for a trainer in this process.

        Its weights have stacked layers, as `apply_model(stack_layers)` gives them (jaxllm.models.dense); those of an
        engine whose layers are a tuple, as it takes them from a Decoder, are that tuple.
        """
        program = self._built.runner.program
        decoder = program.decoder if isinstance(self._engine.weights["layers"], tuple) else None
        decoder = decoder or build_program(program.decoder.cfg)
        return make_dense_logits(decoder, program.kernels, program.mesh, program.rules)

    def update_weights(self, weights: Any) -> None:
        """Replaces the weights by a tree of the same structure, shapes and dtypes, such as `apply_model` gives.

        Layers may be stacked, as a trainer has them, where the engine keeps separate arrays.
        What is enqueued is computed again with the new ones, tokens that it has stay; cached prefixes are forgotten.

        Raises:
            InputError: the tree is another one; an array that differs is named.
        """
        with self._turn:
            self._driver.deliver(self._engine.update_params(collect(weights), casts=False))

    def update_params(self, new: Any, kv: KVMode = "recompute", version: WeightVersion | None = None) -> None:
        """Goes over to new weights: an nnx model, its state, or a tree, with stacked layers or layers by number.

        Arrays of which each device holds what the engine wants there are used as they are; others are copied, and cast
        to the engine's type. What is enqueued and has begun is computed again with the new weights, its tokens stay
        (kv="recompute"); or goes on with the keys and values that it has ("keep"); or ends with the tokens that it has
        ("drop"). Results tell which tokens are of which version: a number that counts up from 0, or what is given here.

        Raises:
            InputError: an array is missing, is not expected or has another shape; the weights are as before then.
        """
        with self._turn:
            self._driver.deliver(self._engine.update_params(collect(new), kv, version))

    def get_weight_version(self) -> WeightVersion:
        """Gives the version of the weights in use: 0 at the start."""
        with self._turn:
            return self._engine.weight_version

    def update_weight_version(self, version: WeightVersion) -> None:
        """Gives the weights in use another version, which what is sampled from now on has.

        Raises:
            InputError: it is neither a whole number nor a text.
        """
        with self._turn:
            self._engine.update_weight_version(version)

    @property
    def model_config(self) -> ModelConfig:
        """What the model looks like: the configuration that a Decoder of it is made from."""
        return self._built.model.unsplit()

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model knows."""
        return self._engine.limits.vocab_size

    def report(self) -> list[tuple[str, str]]:
        """The start-up table: label and value."""
        return self._built.report()

    def wait_until_compiled(self, timeout: float | None = None) -> bool:
        """Waits until no step shape is left to be compiled in the background; False if `timeout` seconds end it.

        Nothing has to wait for it: until then some steps run in larger shapes than they need. Measurements should.
        """
        return self._built.wait_until_compiled(timeout)

    def close(self) -> None:
        """Frees the device's memory; the object is of no use afterwards."""
        self._built.close()

    def shutdown(self) -> None:
        """Does what `close` does, under vLLM's name."""
        self.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _tokenized(self, prompts: Prompt | Sequence[Prompt]) -> list[TokenizedPrompt]:
        return [self._front.tokenize(prompt) for prompt in prompt_list(prompts)]

    def _rendered(self, messages: Messages | Sequence[Messages], options: Mapping[str, Any]) -> list[TokenizedPrompt]:
        conversations: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        return [self._front.render(conversation, **options) for conversation in conversations]

    def _answer(
        self,
        prompts: list[TokenizedPrompt],
        params: Params,
        use_tqdm: UseTqdm,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        with self._turn:
            streams = self._open("generate", prompts, self._params(params, len(prompts)))
            with progress(use_tqdm, len(streams), "generating") as bar:
                self._run(streams, bar, _priorities(priority, len(prompts)))
            return [stream.output() for stream in streams]

    def _enqueue(
        self, prompts: list[TokenizedPrompt], params: Params, priority: int | Sequence[int] | None
    ) -> list[str]:
        with self._turn:
            streams = self._open("enqueued", prompts, self._params(params, len(prompts)))
            self._add(streams, _priorities(priority, len(prompts)))
            self._enqueued += streams
            return [stream.request_id for stream in streams]

    def _params(self, params: Params, count: int) -> list[SamplingParams]:
        """Gives each request's parameters; nobody looks at a request before its end, so the engine need not tell."""
        if params is None or isinstance(params, SamplingParams):
            return [_quiet(self.get_default_sampling_params() if params is None else params)] * count
        if len(params) != count:
            raise InputError(f"there are {count} prompts and {len(params)} sampling_params: give one, or one each")
        return [_quiet(each) for each in params]

    def _open(self, kind: str, prompts: list[TokenizedPrompt], params: list[SamplingParams]) -> list[RequestStream]:
        """Begins to follow requests, all of which can be accepted."""
        checked = []
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            with _naming("prompt", index, len(prompts)):
                checked.append(self._front.check(prompt, param))
        return [self._front.open(self._next_id(kind), *each) for each in zip(prompts, checked, strict=True)]

    def _add(self, followers: Sequence[Follower], priorities: Sequence[int]) -> None:
        """Admits all of these or none."""
        try:
            for follower, priority in zip(followers, priorities, strict=True):
                self._driver.add(follower, priority)
        except BaseException:
            self._driver.cancel(followers)
            raise

    def _run(self, followers: Sequence[Follower], bar: Progress, priorities: Sequence[int] | None = None) -> None:
        """Runs requests to their ends; those that the engine has not got yet come with their priorities."""
        try:
            if priorities is not None:
                self._add(followers, priorities)
            self._driver.run(followers, bar.take)
        finally:  # an interrupt or an error leaves nothing running
            self._driver.cancel(followers)

    def _next_id(self, kind: str) -> str:
        return f"{kind}-{next(self._numbers)}"


def _quiet(params: SamplingParams) -> SamplingParams:
    return params.replace(output_kind=RequestOutputKind.FINAL_ONLY)


def _priorities(priority: int | Sequence[int] | None, count: int) -> list[int]:
    if priority is None or isinstance(priority, int):
        return [priority or 0] * count
    if len(priority) != count:
        raise InputError(f"there are {count} prompts and {len(priority)} priorities: give one each")
    return list(priority)


@contextmanager
def _naming(what: str, index: int, count: int) -> Iterator[None]:
    """Puts the place among several in front of a refusal."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{what} {index}: {error}" if count > 1 else str(error)) from None
