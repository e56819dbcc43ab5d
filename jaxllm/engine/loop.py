"""The engine on a thread of its own: messages in, updates and replies out. Knows no text and no event loop."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxllm.engine.engine import Engine
from jaxllm.engine.messages import (
    ENGINE_CALLS,
    UPDATING_CALLS,
    AbortRequests,
    AddRequest,
    EngineCall,
    EngineOutput,
    EngineReply,
    EngineStats,
    Message,
    RankStats,
    sample_ids,
)
from jaxllm.scheduler.request import RequestUpdate

logger = logging.getLogger(__name__)

Publish = Callable[[list[EngineOutput]], None]


class EngineLoop:
    """Drives an engine until stopped; `publish` is called on its thread after each step that brought something.

    `died` holds the exception that ended the loop, if one did; `on_death` is then called once.
    """

    def __init__(
        self,
        engine: Engine,
        publish: Publish,
        on_death: Callable[[BaseException], None],
        on_step: Callable[[int], None] = lambda num_quiet: None,
    ):
        """`on_step` gets Engine.num_quiet_tokens after each step, on the loop's thread."""
        self.died: BaseException | None = None
        self.stats = read_stats(engine)
        self._engine = engine
        self._publish = publish
        self._on_death = on_death
        self._on_step = on_step
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jaxllm-engine", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Hands a message over; it is taken up between two steps."""
        self._inbox.put(message)

    def stop(self, timeout: float | None = None) -> None:
        """Ends the loop after the step it is in; what still lives is aborted."""
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    @property
    def hanging(self) -> str | None:
        """Names the step that does not return, if there is one."""
        return self._engine.hanging

    def _run(self) -> None:
        try:
            while self._take_messages():
                updates = self._engine.step()
                self.stats = read_stats(self._engine)
                self._on_step(self._engine.num_quiet_tokens)
                if updates:
                    self._publish([*updates])
        except BaseException as error:
            self.died = error
            logger.exception("the engine's loop ended")
            self._on_death(error)

    def _take_messages(self) -> bool:
        """Takes up all messages, waiting for one if there is nothing else to do; False when told to stop."""
        outputs: list[EngineOutput] = []
        while True:
            idle = not self._engine.has_work and not outputs
            try:
                message = self._inbox.get(block=idle)
            except queue.Empty:
                break
            if message is None:
                return False
            outputs += self._handle(message)
        if outputs:
            self.stats = read_stats(self._engine)
            self._publish(outputs)
        return True

    def _handle(self, message: Message) -> Sequence[EngineOutput]:
        match message:
            case AddRequest():
                try:
                    self._engine.add(
                        message.request_id,
                        message.prompt_ids,
                        message.params,
                        message.priority,
                        message.cache_salt,
                        None,  # no deadline
                        message.outputs,
                    )
                except ValueError as error:
                    ids = message.outputs or sample_ids(message.request_id, message.params.n)
                    return [RequestUpdate(each, finish_reason="error", error=str(error)) for each in ids]
                return []
            case AbortRequests():
                ended = [self._engine.abort(request_id) for request_id in message.request_ids]
                return [update for update in ended if update is not None]
            case EngineCall():
                return self._call(message)

    def _call(self, call: EngineCall) -> list[EngineOutput]:
        """Calls a method, or reads a property, for a front that waits; an error is its own, not the loop's.

        What a pause still reads from the steps under way comes before the reply.
        """
        if call.method not in ENGINE_CALLS:
            known = ", ".join(sorted(ENGINE_CALLS))
            return [EngineReply(call.call_id, error=f"there is no engine call {call.method!r}; choose one of {known}")]
        try:
            member = getattr(self._engine, call.method)
            value: Any = member(*call.arguments) if callable(member) else member
        except ValueError as error:
            return [EngineReply(call.call_id, error=str(error), is_refusal=True)]
        except Exception as error:
            logger.exception("%s failed", call.method)
            return [EngineReply(call.call_id, error=f"{call.method} failed: {type(error).__name__}: {error}")]
        if call.method in UPDATING_CALLS:
            return [*value, EngineReply(call.call_id)]
        return [EngineReply(call.call_id, value)]


def read_stats(engine: Engine) -> EngineStats:
    """Reads an engine between two steps."""
    stats = engine.scheduler.stats
    num_blocks, block_size = engine.scheduler.pool_size
    return EngineStats(
        running=stats.running,
        waiting=stats.waiting,
        kv_usage=stats.kv_usage,
        num_preemptions=stats.num_preemptions,
        num_scheduled_tokens=stats.num_scheduled_tokens,
        num_recomputed_tokens=stats.num_recomputed_tokens,
        num_discarded_tokens=stats.num_discarded_tokens,
        prefix_cache_queries=stats.prefix_cache_queries,
        prefix_cache_hits=stats.prefix_cache_hits,
        num_steps=engine.times.num_steps,
        num_padded_tokens=engine.times.num_padded_tokens,
        steps_by_size=tuple(engine.times.steps_by_size),
        num_blocks=num_blocks,
        block_size=block_size,
        ranks=tuple(_read_ranks(engine)),
    )


def _read_ranks(engine: Engine) -> Iterator[RankStats]:
    counted = engine.times.tokens_by_rank
    for rank, stats in enumerate(engine.scheduler.rank_stats):
        yield RankStats(
            running=stats.running,
            kv_usage=stats.kv_usage,
            num_preemptions=stats.num_preemptions,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            num_step_tokens=counted[rank].num_computed if counted else 0,
            num_padded_tokens=counted[rank].num_padded if counted else 0,
        )
