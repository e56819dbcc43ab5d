"""The engine on its own thread for asyncio programs. Knows how one is started; requests are EngineClient's. No HTTP."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from jaxllm.api.engine_client import EngineClient, PauseMode
from jaxllm.api.errors import EngineDeadError, RequestError
from jaxllm.api.listeners import Listeners
from jaxllm.api.start import ModelLike, Started, TokenizerLike, start, start_engine
from jaxllm.config.engine_args import EngineArgs
from jaxllm.engine.build import BuiltEngine
from jaxllm.engine.engine import KVMode
from jaxllm.engine.limits import EngineLimits
from jaxllm.engine.loop import EngineLoop
from jaxllm.engine.messages import EngineStats, Message
from jaxllm.mesh.axes import AxisRules
from jaxllm.models.given import collect
from jaxllm.scheduler.request import WeightVersion


class EngineThread:
    """The link to an engine that runs on a thread of this process."""

    def __init__(self, built: BuiltEngine, listeners: Listeners, on_step: Callable[[int], None]):
        """`on_step` gets Engine.num_quiet_tokens after each step, on the engine's thread."""
        self._built = built
        self._listeners = listeners
        self._lost: str | None = None  # why other processes of the engine, and so this one, end
        if built.processes is not None:
            built.processes.on_loss(self._on_loss)
        self.loop = EngineLoop(built.engine, listeners.publish, self._on_death, on_step)

    @property
    def limits(self) -> EngineLimits:
        return self._built.engine.limits

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self._built.sampling_defaults

    @property
    def stats(self) -> EngineStats:
        return self.loop.stats

    @property
    def lost(self) -> str | None:
        """Says why nothing will be answered any more."""
        return self._lost if self.loop.died is None else f"the engine died: {self.loop.died}"

    @property
    def trouble(self) -> str | None:
        """Names the step that does not return, if there is one."""
        return None if self.loop.hanging is None else f"the engine hangs: {self.loop.hanging}"

    def send(self, message: Message) -> None:
        """Hands a message over; it is taken up between two steps."""
        self.loop.send(message)

    def stop(self) -> None:
        """Ends the loop after the step it is in."""
        self.loop.stop()

    def close(self) -> None:
        """Gives the engine's memory and threads back."""
        self._built.close()

    def _on_loss(self, line: str) -> None:
        self._lost = line
        self._listeners.fail_all(EngineDeadError(line))

    def _on_death(self, error: BaseException) -> None:
        self._listeners.fail_all(EngineDeadError(f"the engine died: {type(error).__name__}: {error}"))


class AsyncLLM(EngineClient):
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
        self._built = started.built
        listeners = Listeners()
        thread = EngineThread(started.built, listeners, lambda num_quiet: self.books.take_step(num_quiet))
        self._loop = thread.loop
        super().__init__(thread, listeners, started.tokenizer, started.model_name)

    def report(self) -> list[tuple[str, str]]:
        """The start-up table: label and value."""
        return self._built.report()

    async def update_params(self, new: Any, kv: KVMode = "recompute", version: WeightVersion | None = None) -> None:
        """Goes over to new weights between two steps, as LLM.update_params does.

        Raises:
            InputError: an array is missing, is not expected or has another shape; the weights are as before then.
        """
        await self._call("update_params", collect(new), kv, version)

    async def wait_until_compiled(self, timeout: float | None = None) -> bool:
        """Waits until no step shape is left to be compiled in the background; see LLM."""
        return await asyncio.to_thread(self._built.wait_until_compiled, timeout)


__all__ = ["AsyncLLM", "EngineDeadError", "PauseMode", "RequestError"]
