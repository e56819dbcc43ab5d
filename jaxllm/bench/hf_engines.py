"""Two ways in which transformers generates for many requests: padded batches, and its own continuous batching.

Knows torch and transformers, and may only be imported where they are installed; nothing of jaxllm's engine.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from jaxllm.bench.figures import Run
from jaxllm.bench.hf_model import HFModel
from jaxllm.bench.subject import Progress
from jaxllm.bench.workloads import WorkloadRequest

_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 8, 16
_PAGE_SIZE = 256  # transformers' default
_CPU_BATCH_TOKENS = 512


class StaticHF:
    """`generate` on batches in the order of the requests: left-padded, and each runs until its longest has ended.

    Tokens beyond a request's own output_len are thrown away and not counted.
    """

    name = "hf static"

    def __init__(self, model: HFModel, batch_size: int):
        self._hf = model
        self._batch_size = batch_size

    @property
    def vocab_size(self) -> int:
        return self._hf.model.config.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._hf.max_model_len

    def facts(self) -> dict[str, Any]:
        return self._hf.facts | {"hf_static": f"generate, sdpa, batches of {self._batch_size}"}

    def warm_up(self, requests: Sequence[WorkloadRequest], progress: Progress) -> None:
        """Runs a few short requests: nothing is compiled per shape here."""
        self.run(_shortened(requests), progress)

    def run(self, requests: Sequence[WorkloadRequest], progress: Progress) -> Run:
        """Generates batch after batch."""
        outputs: list[list[int]] = []
        start = time.perf_counter()
        for first in range(0, len(requests), self._batch_size):
            batch = requests[first : first + self._batch_size]
            outputs += self._generate(batch)
            progress(len(batch))
        return Run(time.perf_counter() - start, outputs)

    def close(self) -> None:
        """Leaves the model to the next way of generating."""

    def _generate(self, batch: Sequence[WorkloadRequest]) -> list[list[int]]:
        width = max(len(request.prompt) for request in batch)
        ids = torch.tensor([[0] * (width - len(request.prompt)) + request.prompt for request in batch])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
        longest = max(request.output_len for request in batch)
        with torch.inference_mode():
            rows = self._hf.model.generate(
                ids.to(self._hf.device), attention_mask=mask.to(self._hf.device), max_new_tokens=longest
            )
        tokens = rows[:, width:].tolist()
        return [row[: request.output_len] for row, request in zip(tokens, batch, strict=True)]


class ContinuousHF:
    """transformers' continuous batching, what `generate_batch` runs on: each request ends at its own length.

    Making its cache and warming it up happen before the clock starts.
    """

    name = "hf continuous"

    def __init__(self, model: HFModel):
        self._hf = model

    @property
    def vocab_size(self) -> int:
        return self._hf.model.config.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._hf.max_model_len

    def facts(self) -> dict[str, Any]:
        return self._hf.facts | {"hf_continuous": "continuous batching, sdpa, no block sharing"}

    def warm_up(self, requests: Sequence[WorkloadRequest], progress: Progress) -> None:
        """Runs a few short requests."""
        self.run(_shortened(requests), progress)

    def run(self, requests: Sequence[WorkloadRequest], progress: Progress) -> Run:
        """Sends all requests and collects them as they end.

        Raises:
            RuntimeError: transformers' thread ended, or a request failed.
        """
        model: Any = self._hf.model
        hints = WorkloadHints(
            max_prompt_length=max(len(request.prompt) for request in requests),
            max_generated_length=max(request.output_len for request in requests),
            num_requests=len(requests),
        )
        with model.continuous_batching_context_manager(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=self._config(requests),
            workload_hints=hints,
            timeout=60,
        ) as manager:
            start = time.perf_counter()
            names = [
                manager.add_request(request.prompt, max_new_tokens=request.output_len, record_timestamps=True)
                for request in requests
            ]
            results: dict[str, Any] = {}
            while len(results) < len(names):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError(f"transformers stopped after {len(results)} of {len(names)} requests")
                if result is not None and result.is_finished():
                    results[result.request_id] = result
                    progress(1)
            seconds = time.perf_counter() - start
        ended = [results[name] for name in names]
        failed = [result.error for result in ended if result.error is not None]
        if failed:
            raise RuntimeError(f"transformers failed {len(failed)} request(s): {failed[0]}")
        times = [[stamp - result.created_time for stamp in result.timestamps or ()] for result in ended]
        return Run(seconds, [list(result.generated_tokens) for result in ended], times)

    def close(self) -> None:
        """Gives the memory back that generating left."""
        if self._hf.device == "cuda":
            torch.cuda.empty_cache()

    def _config(self, requests: Sequence[WorkloadRequest]) -> ContinuousBatchingConfig:
        if self._hf.device == "cuda":
            return ContinuousBatchingConfig(allow_block_sharing=False)
        # On a CPU transformers would take most of the memory for its cache: it gets what the requests need at most.
        pages = sum(-(-(len(request.prompt) + request.output_len) // _PAGE_SIZE) for request in requests)
        return ContinuousBatchingConfig(
            allow_block_sharing=False, num_blocks=pages + 1, max_batch_tokens=_CPU_BATCH_TOKENS
        )


def _shortened(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    few = requests[:_WARM_UP_REQUESTS]
    return [request._replace(output_len=min(request.output_len, _WARM_UP_TOKENS)) for request in few]
