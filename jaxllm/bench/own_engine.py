"""The engine in this process under measurement: token ids in, token ids out. Knows Engine; no text, no HTTP."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxllm.api.start import start_engine
from jaxllm.bench.figures import Run, StepFigures
from jaxllm.bench.subject import Progress
from jaxllm.bench.workloads import WorkloadRequest
from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.engine import StepTimes
from jaxllm.models.config import ModelConfig
from jaxllm.scheduler.batch import SchedulerStats


class OwnEngine:
    """Drives an engine step by step and notes when each token came."""

    name = "jaxllm"

    def __init__(self, args: EngineArgs):
        start = time.perf_counter()
        self._built = start_engine(args).built
        self._seconds = time.perf_counter() - start
        self._built.wait_until_compiled()  # what is measured is the shapes that a step needs, not what stands in
        self._compiled_seconds = time.perf_counter() - start
        self._engine = self._built.engine
        self._num_sent = 0

    @property
    def vocab_size(self) -> int:
        return self._engine.limits.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._engine.limits.max_model_len

    def facts(self) -> dict[str, Any]:
        devices = list(self._built.runner.program.mesh.devices.flat)
        return {
            "device": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
            "versions": {"jax": jax.__version__, "jaxlib": metadata.version("jaxlib")},
            "dtype": self._built.model.dtype,
            "start_up_seconds": round(self._seconds, 2),
            "all_compiled_seconds": round(self._compiled_seconds, 2),
            "engine": dict(self._built.report()),
        }

    def warm_up(self, requests: Sequence[WorkloadRequest], progress: Progress) -> None:
        """Runs requests of the same lengths: whoever schedules the same lengths meets the same step shapes.

        On a GPU, where all is compiled by now, a quarter of them, or a full batch, loads the programs.
        """
        enough = max(self._built.compiler.num_rows, len(requests) // 4)
        self.run(requests if self._built.runner.program.platform == "cpu" else requests[:enough], progress)

    def run(self, requests: Sequence[WorkloadRequest], progress: Progress) -> Run:
        """Sends all requests, then steps until the last has ended.

        Raises:
            InputError: a request that the engine cannot take.
            RuntimeError: a step failed.
        """
        engine = self._engine
        gc.collect()
        stats, engine.times = engine.scheduler.stats, StepTimes()
        places: dict[str, int] = {}
        outputs: list[list[int]] = [[] for _ in requests]
        token_times: list[list[float]] = [[] for _ in requests]
        arrivals = []
        start = time.perf_counter()
        try:
            for place, request in enumerate(requests):
                arrivals.append(time.perf_counter())
                places[self._send(request)] = place
            while engine.has_work:
                updates = engine.step()
                now = time.perf_counter()
                for running, token in updates.going_on():
                    place = places[running.request_id]
                    outputs[place].append(token)
                    token_times[place].append(now - arrivals[place])
                for update in updates.others():
                    if update.finish_reason == "error":
                        raise RuntimeError(f"a step failed, so nothing was measured: {update.error}")
                    place = places[update.request_id]
                    outputs[place] += update.token_ids
                    token_times[place] += [now - arrivals[place]] * len(update.token_ids)
                    if update.finish_reason is not None:
                        progress(1)
            seconds = time.perf_counter() - start
        finally:
            for request_id in places:  # an interrupt or an error leaves nothing running
                engine.abort(request_id)
            while engine.has_work:
                engine.step()
        return Run(seconds, outputs, token_times, step_figures(engine.times, stats, engine.scheduler.stats))

    @property
    def model(self) -> ModelConfig:
        return self._built.model

    @property
    def kv_dtype(self) -> str:
        return self._built.runner.program.kv_dtype.name

    def program_texts(self) -> dict[str, Callable[[], str | None]]:
        """Gives for each compiled step, by its name in a trace, what reads its optimised program."""
        return self._built.runner.program_texts()

    def largest_decode_step(self) -> tuple[str, str]:
        """Names the largest decode step compiled so far, and gives its optimised program."""
        shapes = [shape for shape in self._built.compiler.step_shapes() if shape.program == "decode"]
        largest = max(shapes, key=lambda shape: (shape.num_tokens, shape.variant == "greedy"))
        text = self.program_texts()[f"jit_{largest.label}"]()
        assert text is not None
        return f"B={largest.num_requests}", text

    def trace(self, requests: Sequence[WorkloadRequest], windows: Mapping[int, Path], num_steps: int) -> None:
        """Runs requests for traces of `num_steps` steps from the windows' first steps on, and no further.

        Each begins and ends with nothing in flight, so that it holds whole steps.

        Raises:
            InputError: a request that the engine cannot take, or a trace runs already.
        """
        engine = self._engine
        names = [self._send(request) for request in requests]
        left, step, last = dict(windows), 0, max(windows) + num_steps
        tracing_until = -1
        try:
            while engine.has_work and step < last:
                if step in left:
                    engine.pause()
                    engine.resume()
                    engine.start_profile(str(left.pop(step)), python_calls=False)
                    tracing_until = step + num_steps
                engine.step()
                step += 1
                if step == tracing_until:
                    engine.pause()
                    engine.resume()
                    engine.stop_profile()
                    tracing_until = -1
        finally:
            for request_id in names:
                engine.abort(request_id)
            while engine.has_work:
                engine.step()
            if tracing_until >= 0:
                engine.stop_profile()

    def close(self) -> None:
        self._built.close()

    def _send(self, request: WorkloadRequest) -> str:
        self._num_sent += 1
        request_id = f"bench-{self._num_sent}"
        params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True)
        try:
            self._engine.add(request_id, request.prompt, params)
        except ValueError as error:
            raise InputError(str(error)) from None
        return request_id


def step_figures(times: StepTimes, before: SchedulerStats, after: SchedulerStats) -> StepFigures:
    """Draws the figures of the steps of one run from the counters before and after it."""
    steps = max(times.num_steps, 1)
    computed = after.num_scheduled_tokens - before.num_scheduled_tokens + times.num_padded_tokens
    return StepFigures(
        num_steps=times.num_steps,
        mean_batch=times.num_batched_requests / steps,
        kv_utilisation=times.kv_utilisation,
        kv_usage_peak=times.kv_usage_peak,
        padding_share=times.num_padded_tokens / max(computed, 1),
        num_recomputed_tokens=after.num_recomputed_tokens - before.num_recomputed_tokens,
        num_discarded_tokens=after.num_discarded_tokens - before.num_discarded_tokens,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        schedule_ms=1e3 * times.schedule / steps,
        build_ms=1e3 * times.build / steps,
        execute_ms=1e3 * times.execute / steps,
        update_ms=1e3 * times.update / steps,
        wait_ms=1e3 * times.wait / steps,
    )
