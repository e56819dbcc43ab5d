"""The requests that run now, and the last ones that did. Knows counts, names and times; no engine, no HTTP."""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxllm.config.sampling_params import SamplingParams
from jaxllm.server.errors import ApiError
from jaxllm.server.prepare import PreparedRequest

_NUM_REMEMBERED = 128
_NUM_TIMED = 32  # requests whose ends tell how fast the queue moves
_LONGEST_WAIT = 60  # seconds that a client is told to wait at most
CLIENT_FIELDS = frozenset(each.name for each in dataclasses.fields(SamplingParams)) - {
    *("output_kind", "detokenize", "flat_logprobs", "bad_word_token_ids")  # the server's own
}


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What is remembered of one request; its tokens only where they may be written to a crash dump."""

    request_id: str
    answer_id: str
    num_samples: int
    num_prompt_tokens: int
    sampling_params: Mapping[str, Any]
    priority: int
    arrived: float = field(default_factory=time.time)
    num_output_tokens: int = 0
    finish_reason: str | None = None
    seconds: float | None = None
    prompt_token_ids: list[int] | None = None
    output_token_ids: list[int] | None = None

    def take(self, token_ids: Sequence[int], finish_reason: str | None) -> None:
        """Takes note of what came new."""
        self.num_output_tokens += len(token_ids)
        self.finish_reason = finish_reason or self.finish_reason
        if self.output_token_ids is not None:
            self.output_token_ids += token_ids


class InFlight:
    """The requests that were given to the engine and have not ended, and the last that have."""

    def __init__(self, max_queued: int | None = None, max_running: int = 0, keeps_tokens: bool = False):
        self._max_queued = max_queued
        self._max_running = max_running
        self._keeps_tokens = keeps_tokens
        self._open: dict[str, RequestRecord] = {}
        self._num_samples = 0
        self._ended: deque[RequestRecord] = deque(maxlen=_NUM_REMEMBERED)
        self._ends: deque[float] = deque(maxlen=_NUM_TIMED)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: PreparedRequest) -> RequestRecord:
        """Takes note of a request that the engine is about to get."""
        record = RequestRecord(
            request.request_id,
            request.answer_id or request.request_id,
            request.params.n,
            request.num_prompt_tokens,
            told_params(request.params),
            request.priority,
        )
        if self._keeps_tokens:
            record.prompt_token_ids, record.output_token_ids = request.prompt.token_ids, []
        self._open[record.request_id] = record
        self._num_samples += record.num_samples
        return record

    def close(self, record: RequestRecord) -> None:
        """Takes note that a request has ended."""
        if self._open.pop(record.request_id, None) is None:
            return
        self._num_samples -= record.num_samples
        record.seconds = time.time() - record.arrived
        self._ended.append(record)
        self._ends.append(time.monotonic())

    def called(self, answer_id: str) -> list[str]:
        """Gives the engine's ids of what the client knows under one id, or of one request by the engine's own."""
        return [each.request_id for each in self._open.values() if answer_id in (each.answer_id, each.request_id)]

    def all(self) -> list[str]:
        """Gives the engine's ids of all that run."""
        return list(self._open)

    def check_room(self, num_waiting: int) -> None:
        """Refuses a request for which the queue is too long; `num_waiting` is the engine's last reading of it.

        Raises:
            ApiError: with the status 429, and the seconds after which it is worth trying again.
        """
        if self._max_queued is None:
            return
        beyond_rows = self._num_samples + 1 - self._max_running if self._max_running else 0
        if beyond_rows <= self._max_queued and num_waiting <= max(self._max_queued - 1, 0):
            return
        wait = self._seconds_to_wait(max(num_waiting, beyond_rows))
        raise ApiError(
            f"the queue is full: {max(num_waiting, beyond_rows - 1)} requests wait, --max-queued-requests is "
            f"{self._max_queued}; try again in {wait} s",
            status=429,
            code="queue_full",
            headers={"Retry-After": str(wait)},
        )

    def remembered(self) -> list[RequestRecord]:
        """Gives the last requests that ended and all that run, oldest first."""
        return [*self._ended, *self._open.values()]

    def _seconds_to_wait(self, num_ahead: int) -> int:
        """Guesses how long the queue needs at the pace of the last requests that ended."""
        if len(self._ends) < 2:
            return 1
        pace = (time.monotonic() - self._ends[0]) / len(self._ends)
        return min(max(math.ceil(pace * num_ahead), 1), _LONGEST_WAIT)


def told_params(params: SamplingParams) -> dict[str, Any]:
    """Gives the sampling parameters that differ from their defaults, without those that no client sets."""
    defaults = SamplingParams()
    told = {}
    for name in sorted(CLIENT_FIELDS):
        value = getattr(params, name)
        if value != getattr(defaults, name):
            told[name] = value
    return told
