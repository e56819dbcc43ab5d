"""The requests that an engine has accepted, kept so that another one can go on with them. Knows tokens; no sockets.

An engine of several fronts has requests under names that start with their front's, since two may choose the same.
"""

import dataclasses
from collections.abc import Iterable
from random import Random

from jaxllm.engine.messages import AddRequest, sample_ids
from jaxllm.scheduler.request import RequestUpdate


class _Sample:
    """One sample that has not ended: its name in this process, and the tokens that have come."""

    __slots__ = ("is_aborted", "name", "request", "token_ids")

    def __init__(self, name: str, request: str):
        self.name = name
        self.request = request  # the name of its request in the engine
        self.token_ids: list[int] = []
        self.is_aborted = False


class AcceptedRequests:
    """Renames requests on their way to the engine and their updates on the way back. Not thread-safe."""

    def __init__(self, prefix: str, seeds: Random):
        self._prefix = prefix
        self._seeds = seeds
        self._samples: dict[str, _Sample] = {}  # by their names in the engine
        self._engine_names: dict[str, str] = {}
        self._requests: dict[str, tuple[AddRequest, tuple[str, ...]]] = {}  # and the names of its samples

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, request: AddRequest) -> AddRequest:
        """Takes a request in and gives it as the engine gets it: any engine would give it the same tokens."""
        params = request.params
        if params.seed is None and not params.greedy:
            params = params.replace(seed=self._seeds.getrandbits(64))
        name = self._prefix + request.request_id
        sent = dataclasses.replace(request, request_id=name, params=params)
        names = tuple(sample_ids(name, params.n))
        self._requests[name] = (sent, names)
        for own, its in zip(sample_ids(request.request_id, params.n), names, strict=True):
            self._samples[its] = _Sample(own, name)
            self._engine_names[own] = its
        return sent

    def take(self, updates: Iterable[RequestUpdate]) -> list[RequestUpdate]:
        """Notes what an engine tells, and gives it under this process's names; leaves out what ended before."""
        told = []
        samples = self._samples
        for update in updates:
            sample = samples.get(update.request_id)
            if sample is None:
                continue
            if update.finish_reason is not None:
                self._forget(update.request_id)
            else:
                sample.token_ids += update.token_ids
            update.request_id = sample.name  # pyright: ignore[reportAttributeAccessIssue]
            told.append(update)
        return told

    def abort(self, names: Iterable[str]) -> tuple[str, ...]:
        """Notes that samples are to end; gives their names in the engine."""
        found = tuple(its for name in names if (its := self._engine_names.get(name)) is not None)
        for its in found:
            self._samples[its].is_aborted = True
        return found

    def abort_all(self) -> tuple[str, ...]:
        """Lets go of all requests; gives their names in the engine."""
        names = tuple(self._samples)
        self._samples.clear()
        self._engine_names.clear()
        self._requests.clear()
        return names

    def end_aborted(self) -> list[RequestUpdate]:
        """Ends those that were to end, where the engine that was told so is gone."""
        ended = [name for name, sample in self._samples.items() if sample.is_aborted]
        return self.take([RequestUpdate(name, finish_reason="abort") for name in ended])

    def unfinished(self) -> list[AddRequest]:
        """Gives all requests as an engine that knows none of them has to get them, in the order in which they came."""
        again = []
        for request, names in self._requests.values():
            outputs = {name: self._samples[name].token_ids for name in names if name in self._samples}
            is_new = len(outputs) == len(names) and not any(outputs.values())
            again.append(request if is_new else dataclasses.replace(request, outputs=outputs))
        return again

    def _forget(self, name: str) -> None:
        """Forgets a sample, and its request with the last one."""
        sample = self._samples.pop(name)
        del self._engine_names[sample.name]
        if not any(each in self._samples for each in self._requests[sample.request][1]):
            del self._requests[sample.request]
