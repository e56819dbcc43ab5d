"""The engine on its own thread for asyncio programs: submit a prompt, iterate over what comes. Knows no HTTP."""

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Literal

from jax.sharding import Mesh

from jaxllm.api.errors import EngineDeadError, RequestError
from jaxllm.api.front import Front, refuse_lora
from jaxllm.api.listeners import Listener, Listeners
from jaxllm.api.metrics import Metric, RequestBooks
from jaxllm.api.outputs import OutputDelta, RequestOutput
from jaxllm.api.prompts import Prompt, TokenizedPrompt
from jaxllm.api.request_stream import RequestStream
from jaxllm.api.start import ModelLike, Started, TokenizerLike, start, start_engine
from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.engine.engine import KVMode
from jaxllm.engine.limits import EngineLimits
from jaxllm.engine.loop import EngineLoop
from jaxllm.engine.messages import AbortRequests, AddRequest, EngineCall, EngineStats
from jaxllm.mesh.axes import AxisRules
from jaxllm.models.given import collect
from jaxllm.scheduler.request import WeightVersion
from jaxllm.text.tokenizer import Tokenizer

type PauseMode = Literal["abort", "wait", "keep"]


class AsyncLLM:
    """Generates for many callers at once, on any number of event loops. Keyword arguments are those of LLM.

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
        self._start(start(model, options, tokenizer=tokenizer, mesh=mesh, axis_rules=axis_rules))

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "AsyncLLM":
        """Starts an engine from checked arguments."""
        self = cls.__new__(cls)
        self._start(start_engine(args))
        return self

    @classmethod
    def from_started(cls, started: Started) -> "AsyncLLM":
        """Wraps an engine that runs already."""
        self = cls.__new__(cls)
        self._start(started)
        return self

    def _start(self, started: Started) -> None:
        self._built, self._tokenizer = started.built, started.tokenizer
        self._front = Front(started.tokenizer, self._built.engine.limits, started.model_name)
        self._listeners = Listeners()
        self._held: list[AddRequest] | None = None  # what came while a pause waits for those that run
        self._gate = threading.Lock()  # a request is either sent or held, as far as a pause can see
        self._numbers = itertools.count()
        self._is_shut_down = False
        self._lost: str | None = None  # why other processes of the engine, and so this one, end
        if self._built.processes is not None:
            self._built.processes.on_loss(self._on_loss)
        self._loop = EngineLoop(
            self._built.engine, self._listeners.publish, self._on_death, self._front.books.take_step
        )

    @property
    def limits(self) -> EngineLimits:
        """What requests are checked against."""
        return self._built.engine.limits

    @property
    def stats(self) -> EngineStats:
        """The engine's gauges and counters as of its last step."""
        return self._loop.stats

    @property
    def books(self) -> RequestBooks:
        """What all requests were given so far."""
        return self._front.books

    def report(self) -> list[tuple[str, str]]:
        """The start-up table: label and value."""
        return self._built.report()

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine's loop ended, or a step does not return."""
        self._check_alive()
        if self._loop.hanging is not None:
            raise EngineDeadError(f"the engine hangs: {self._loop.hanging}")

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The fields of SamplingParams of which the model's generation_config.json speaks."""
        return self._built.sampling_defaults

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without sampling_params get."""
        return SamplingParams(**self.sampling_defaults)

    def get_tokenizer(self) -> Tokenizer | None:
        """Gives the tokenizer, or None with skip_tokenizer_init."""
        return self._tokenizer

    def get_metrics(self) -> list[Metric]:
        """Reads the metrics of docs/metrics.md, as LLM.get_metrics does."""
        return self._front.metrics(self.stats)

    def check_request(self, prompt: TokenizedPrompt, params: SamplingParams) -> SamplingParams:
        """Gives the parameters as the engine takes them.

        Raises:
            InputError: the model cannot take the request.
        """
        return self._front.check(prompt, params)

    async def generate(
        self,
        prompt: Prompt | TokenizedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Yields whenever something came; the last output is finished.

        The parameters' output_kind says what an output holds: all samples so far (CUMULATIVE), what came new for one of
        them (DELTA), or everything once, at the end (FINAL_ONLY). Leaving the iteration, or cancelling the task, aborts
        the request.

        Raises:
            InputError: the request cannot be accepted.
            RequestError, EngineDeadError: it was lost, with the cause.
        """
        refuse_lora(lora_request)
        stream = self._make_stream(prompt, sampling_params or self.get_default_sampling_params(), request_id)
        kind = stream.params.output_kind
        async with aclosing(self._deltas(stream, priority)) as deltas:
            async for delta in deltas:
                if kind is RequestOutputKind.DELTA:
                    yield stream.delta_output(delta)
                elif kind is RequestOutputKind.CUMULATIVE or stream.finished:
                    yield stream.output()

    async def stream(
        self,
        prompt: Prompt | TokenizedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[OutputDelta]:
        """As `generate`, but yields only what came new: the cost per token does not grow with the length."""
        stream = self._make_stream(prompt, sampling_params or self.get_default_sampling_params(), request_id)
        async with aclosing(self._deltas(stream, priority)) as deltas:
            async for delta in deltas:
                yield delta

    async def abort(self, request_id: str) -> None:
        """Ends a request; whoever iterates over it gets a last output with finish_reason "abort"."""
        listener = self._listeners.get(request_id)
        if listener is not None:
            self._abort([listener])

    async def abort_all(self) -> int:
        """Ends every request that runs or waits, as `abort` does; gives how many those are."""
        listeners = self._listeners.all()
        self._abort(listeners)
        return len(listeners)

    async def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stops the engine until `resume_generation`; requests that come meanwhile are accepted, and wait.

        What runs is ended ("abort"), goes on to its end ("wait"), or stands still and goes on afterwards ("keep").
        `clear_cache` gives up all KV, also that of requests which stand still: they are computed again, and tokens that
        they have stay.

        Raises:
            InputError: an unknown mode, or waiting for the end of what is paused.
        """
        if mode not in ("abort", "wait", "keep"):
            raise InputError(f"mode must be abort, wait or keep, got {mode!r}")
        if mode == "abort":
            running = self._listeners.all()
            await self._call("pause", "keep")  # nothing that comes behind this is run
            self._abort(running)
        elif mode == "wait":
            await self._finish_all()
        await self._call("pause", "drop" if clear_cache else "keep")
        self._send_held()

    async def resume_generation(self) -> None:
        """Goes on with everything that waits."""
        await self._call("resume")

    async def is_paused(self) -> bool:
        """Says whether the engine is paused."""
        return await self._call("is_paused")

    async def update_params(self, new: Any, kv: KVMode = "recompute", version: WeightVersion | None = None) -> None:
        """Goes over to new weights between two steps, as LLM.update_params does.

        Raises:
            InputError: an array is missing, is not expected or has another shape; the weights are as before then.
        """
        await self._call("update_params", collect(new), kv, version)

    async def get_weight_version(self) -> WeightVersion:
        """Gives the version of the weights in use: 0 at the start."""
        return await self._call("weight_version")

    async def update_weight_version(self, version: WeightVersion) -> None:
        """Gives the weights in use another version, which what is sampled from now on has.

        Raises:
            InputError: it is neither a whole number nor a text.
        """
        await self._call("update_weight_version", version)

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing happens, while requests hold blocks."""
        return await self._call("reset_prefix_cache")

    async def start_profile(self, directory: str = "profile") -> None:
        """Begins a trace of jax's profiler, written to a directory when it stops.

        Raises:
            InputError: one runs already.
        """
        await self._call("start_profile", directory)

    async def stop_profile(self) -> None:
        """Ends the trace and writes it.

        Raises:
            InputError: none runs.
        """
        await self._call("stop_profile")

    async def wait_until_compiled(self, timeout: float | None = None) -> bool:
        """Waits until no step shape is left to be compiled in the background; see LLM."""
        return await asyncio.to_thread(self._built.wait_until_compiled, timeout)

    def shutdown(self) -> None:
        """Ends the engine; requests that still run end with EngineDeadError."""
        self._is_shut_down = True
        self._loop.stop()
        self._listeners.fail_all(EngineDeadError("the engine was shut down"))
        self._built.close()

    def _check_alive(self) -> None:
        if self._loop.died is not None:
            raise EngineDeadError(f"the engine died: {self._loop.died}")
        if self._lost is not None:
            raise EngineDeadError(self._lost)
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down")

    def _make_stream(
        self, prompt: Prompt | TokenizedPrompt, params: SamplingParams, request_id: str | None
    ) -> RequestStream:
        self.check_health()
        tokenized = self._front.tokenize(prompt)
        params = self._front.check(tokenized, params)
        request_id = request_id or f"async-{next(self._numbers)}"
        self._check_unused(request_id)
        return self._front.open(request_id, tokenized, params)

    async def _deltas(self, stream: RequestStream, priority: int) -> AsyncGenerator[OutputDelta]:
        listener = Listener(stream)
        prompt = stream.prompt
        add = AddRequest(stream.request_id, prompt.token_ids, stream.params, priority, prompt.cache_salt)
        self._admit(listener, add)
        try:
            while not stream.finished:
                news = await listener.queue.get()
                if isinstance(news, Exception):
                    raise news
                delta = stream.take(news)
                if delta.finish_reason is not None and (left_over := stream.take_left_over()):
                    self._loop.send(AbortRequests(left_over))
                if delta.token_ids or delta.text or delta.finish_reason:
                    yield delta
        except Exception:
            stream.end("error")
            raise
        finally:
            with self._gate:
                if self._held is not None:
                    self._held = [held for held in self._held if held is not add]
            stream.end("abort")  # the reader left: a stream that has ended takes no notice
            if left_over := stream.take_left_over():
                self._loop.send(AbortRequests(left_over))
            self._listeners.remove(listener)

    def _admit(self, listener: Listener, add: AddRequest) -> None:
        """Sends a request, or holds it while a pause waits for those before it."""
        with self._gate:
            self._check_unused(add.request_id)
            self._listeners.add(listener)
            try:
                # Whoever ends the engine tells the listeners of that moment; one who comes later has to look.
                self._check_alive()
            except EngineDeadError:
                self._listeners.remove(listener)
                listener.stream.end("error")
                raise
            if self._held is None:
                self._loop.send(add)
            else:
                self._held.append(add)

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._listeners:
            raise InputError(f"request id {request_id!r} belongs to a request that has not ended yet")

    def _abort(self, listeners: list[Listener]) -> None:
        """Ends requests; those which the engine has not got yet, too."""
        with self._gate:
            held = {add.request_id for add in self._held or ()}
            if self._held is not None:
                names = {listener.stream.request_id for listener in listeners}
                self._held = [add for add in self._held if add.request_id not in names]
        in_engine: list[str] = []
        for listener in listeners:
            if listener.stream.request_id in held:
                self._listeners.abort(listener)
            else:
                in_engine += listener.stream.sample_ids
        self._loop.send(AbortRequests(tuple(in_engine)))

    async def _finish_all(self) -> None:
        """Waits for the end of what runs; what comes meanwhile is held back, until `_send_held`."""
        if await self.is_paused():
            raise InputError("generation is paused already, so nothing would end: resume it first, or use mode='abort'")
        with self._gate:
            if self._held is not None:
                raise InputError("another call waits for the end of what runs already")
            self._held = []
            running = [listener.ended for listener in self._listeners.all()]
        try:
            await asyncio.gather(*(asyncio.shield(asyncio.wrap_future(ended)) for ended in running))
        except BaseException:
            self._send_held()
            raise

    def _send_held(self) -> None:
        with self._gate:
            held, self._held = self._held or [], None
            for add in held:
                self._loop.send(add)

    async def _call(self, method: str, *arguments: object) -> Any:
        """Calls a method of the engine between two steps and gives what it returns."""
        call = EngineCall(next(self._numbers), method, arguments)
        future = self._listeners.expect_reply(call.call_id)
        try:
            self._check_alive()
            self._loop.send(call)
            reply = await asyncio.wrap_future(future)
        finally:
            self._listeners.forget_reply(call.call_id)
        if reply.error is not None:
            raise InputError(reply.error) if reply.is_refusal else RuntimeError(reply.error)
        return reply.value

    def _on_loss(self, line: str) -> None:
        self._lost = line
        self._listeners.fail_all(EngineDeadError(line))

    def _on_death(self, error: BaseException) -> None:
        self._listeners.fail_all(EngineDeadError(f"the engine died: {type(error).__name__}: {error}"))


__all__ = ["AsyncLLM", "EngineDeadError", "RequestError"]
