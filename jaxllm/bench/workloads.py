"""The workloads that every engine in the comparison runs: the same prompts, to the token. Knows numpy only.

Each request generates exactly its output length, greedy, ignoring EOS. Prompts share no prefix beyond chance. Token ids
stay below every special token of the Llama 3 and Qwen3 vocabularies.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

TOKEN_LOW, TOKEN_HIGH = 100, 100_000
NUM_MIXED = 1000
NUM_BRIEF, BRIEF_OUTPUT = 200, 180  # of H1

WORKLOADS = {
    "L1": "latency: 1 request, input 128, output 256",
    "L8": "latency: 8 requests together, input 128, output 256",
    "W1": "decode-heavy: 1000 requests, input 128, output 512",
    "W2": "mixed: 1000 requests, lognormal input (median 160, 4..2048) and output (median 180, 4..1024)",
    "W3": "prefill-heavy: 500 requests, input 2000, output 32",
    "H1": "the first 200 prompts of W2, output 180",
}
_DRAWN = ("L1", "L8", "W1", "W2", "W3")  # the place in this list seeds the draw
_FIXED = {"L1": (1, 128, 256), "L8": (8, 128, 256), "W1": (1000, 128, 512), "W3": (500, 2000, 32)}


class WorkloadRequest(NamedTuple):
    """A prompt of token ids and the number of tokens to generate."""

    prompt: list[int]
    output_len: int


def workload(name: str, seed: int = 0, limit: int | None = None, repeat: int = 0) -> list[WorkloadRequest]:
    """Gives the requests of a workload; `repeat` draws other token ids for the same lengths.

    Raises:
        KeyError: no workload has this name.
    """
    if name == "H1":
        count = NUM_BRIEF if limit is None else min(limit, NUM_BRIEF)
        return [request._replace(output_len=BRIEF_OUTPUT) for request in workload("W2", seed, count, repeat)]
    lengths = workload_lengths(name, seed)[:limit]
    rng = np.random.default_rng([seed, 1 + _DRAWN.index(name), repeat])
    return [WorkloadRequest(rng.integers(TOKEN_LOW, TOKEN_HIGH, a).tolist(), b) for a, b in lengths]


def random_requests(count: int, input_len: int, output_len: int, seed: int, repeat: int = 0) -> list[WorkloadRequest]:
    """Gives requests of one's own lengths, drawn as the workloads are."""
    rng = np.random.default_rng([seed, 0, repeat])
    prompts = rng.integers(TOKEN_LOW, TOKEN_HIGH, (count, input_len)).tolist()
    return [WorkloadRequest(prompt, output_len) for prompt in prompts]


def folded(requests: Sequence[WorkloadRequest], vocab_size: int) -> list[WorkloadRequest]:
    """Brings token ids into a smaller vocabulary; the digest then differs from the comparison's."""
    if all(max(request.prompt) < vocab_size for request in requests):
        return list(requests)
    return [request._replace(prompt=[token % vocab_size for token in request.prompt]) for request in requests]


def workload_lengths(name: str, seed: int = 0) -> list[tuple[int, int]]:
    """Gives (input, output) lengths in tokens."""
    if name in _FIXED:
        count, num_in, num_out = _FIXED[name]
        return [(num_in, num_out)] * count
    if name != "W2":
        raise KeyError(name)
    rng = np.random.default_rng(seed)
    inputs = np.clip(np.rint(rng.lognormal(np.log(160.0), 1.0, NUM_MIXED)), 4, 2048).astype(int)
    outputs = np.clip(np.rint(rng.lognormal(np.log(180.0), 0.9, NUM_MIXED)), 4, 1024).astype(int)
    return list(zip(inputs.tolist(), outputs.tolist(), strict=True))


def digest(requests: Sequence[WorkloadRequest]) -> str:
    """A short fingerprint, to show that two engines ran the same requests."""
    h = hashlib.sha256()
    for request in requests:
        h.update(np.asarray(request.prompt, dtype=np.int32).tobytes())
        h.update(int(request.output_len).to_bytes(4, "little"))
    return h.hexdigest()[:16]
