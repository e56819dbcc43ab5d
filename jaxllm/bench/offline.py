"""Runs a workload through the engine in this process and reports times per token. Knows LLM; no HTTP."""

import statistics
import time
from dataclasses import dataclass

from jaxllm.api.llm import LLM
from jaxllm.api.outputs import RequestOutput
from jaxllm.bench.workloads import WorkloadRequest, digest, workload
from jaxllm.config.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Measurement:
    """One workload's result; times in milliseconds are medians over its requests."""

    name: str
    digest: str
    num_requests: int
    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_ms: float
    tpot_ms: float

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds

    def row(self) -> list[str]:
        """The cells of one table row, in the order of HEADER."""
        return [
            self.name,
            self.digest,
            str(self.num_requests),
            f"{self.seconds:.2f}",
            f"{self.output_tokens_per_second:,.1f}",
            f"{(self.num_prompt_tokens + self.num_output_tokens) / self.seconds:,.1f}",
            f"{self.ttft_ms:.1f}",
            f"{self.tpot_ms:.3f}",
        ]


HEADER = ["workload", "digest", "requests", "seconds", "out tok/s", "total tok/s", "TTFT ms", "TPOT ms"]


def measure(llm: LLM, name: str, limit: int | None = None, max_token: int | None = None) -> Measurement:
    """Runs a workload twice, the first time to warm up, and reports the second."""
    requests = []
    for repeat in (1, 0):
        requests = [folded(request, max_token) for request in workload(name, limit=limit, repeat=repeat)]
        start = time.perf_counter()
        outputs = generate(llm, requests)
        seconds = time.perf_counter() - start
    return Measurement(
        name=name,
        digest=digest(requests),
        num_requests=len(requests),
        seconds=seconds,
        num_prompt_tokens=sum(len(request.prompt) for request in requests),
        num_output_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        ttft_ms=1e3 * statistics.median(output.metrics.time_to_first_token or 0.0 for output in outputs),
        tpot_ms=1e3 * statistics.median(time_per_output_token(output) for output in outputs),
    )


def generate(llm: LLM, requests: list[WorkloadRequest]) -> list[RequestOutput]:
    """Generates exactly output_len tokens for each request, greedy."""
    params = [SamplingParams(temperature=0.0, max_tokens=r.output_len, ignore_eos=True) for r in requests]
    return llm.generate([{"prompt_token_ids": r.prompt} for r in requests], params, use_tqdm=False)


def folded(request: WorkloadRequest, max_token: int | None) -> WorkloadRequest:
    """Token ids of a smaller vocabulary; the digest then differs from the comparison's."""
    if max_token is None or max(request.prompt) < max_token:
        return request
    return WorkloadRequest([token % max_token for token in request.prompt], request.output_len)


def time_per_output_token(output: RequestOutput) -> float:
    """Seconds per token after the first."""
    metrics, count = output.metrics, len(output.outputs[0].token_ids)
    if metrics.first_token_time is None or metrics.last_token_time is None or count < 2:
        return 0.0
    return (metrics.last_token_time - metrics.first_token_time) / (count - 1)
