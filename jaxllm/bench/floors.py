"""The least time that a workload can take on a device, from bytes and FLOPs. Knows arithmetic; measures nothing.

A step reads every weight once, or multiplies by it for each of its tokens, whichever takes longer; then it reads the
keys and values that its tokens attend to. Steps are as full as rows allow, nothing is computed twice, logits are made
for the tokens that are sampled only, and the host takes no time. docs/benchmarking.md has the formulae.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from jaxllm.bench.ceilings import Ceilings
from jaxllm.models.config import ModelConfig
from jaxllm.models.forward import build_program

Lengths = Sequence[tuple[int, int]]  # prompt and output tokens of each request


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a model costs: bytes of the weights that a step reads, FLOPs, bytes of KV."""

    weight_bytes: int  # without the embedding table, of which a step reads a few rows, unless the head is that table
    layer_flops: int  # of a token in all layers, attention's products aside
    head_flops: int  # of a token that is sampled
    pair_flops: int  # of a layer's attention, for a token and a key
    kv_bytes: int  # of a token in one layer
    windows: tuple[int | None, ...]  # of each layer

    def context_pairs(self, start: int, end: int) -> int:
        """Keys that the tokens at positions [start, end) attend to, summed over tokens and layers."""
        whole = _sum_to(end) - _sum_to(start)
        return sum(
            whole if window is None else _sum_to_window(end, window) - _sum_to_window(start, window)
            for window in self.windows
        )


@dataclass(frozen=True, slots=True)
class Floor:
    """The least times of a workload, in seconds: all of it, one step of decoding, the first token."""

    total: float
    tpot: float
    ttft: float


def work_of(cfg: ModelConfig, kv_dtype: str) -> ModelWork:
    """Counts what a model costs with keys and values kept in a type."""
    size, layer_size, head_size = 0, 0, 0
    for param in build_program(cfg).params:
        count = 1
        for axis in param.stored_shape:
            count *= axis
        is_table = param.path == ("embedding", "tokens")
        size += count if not is_table or cfg.tie_embeddings else 0
        layer_size += count if param.path[0] == "layers" and param.role == "matrix" else 0
        head_size = cfg.vocab_size * cfg.d_model
    return ModelWork(
        weight_bytes=size * jnp.dtype(cfg.dtype).itemsize,
        layer_flops=2 * layer_size,
        head_flops=2 * head_size,
        pair_flops=4 * cfg.num_q_heads * cfg.head_dim,
        kv_bytes=2 * cfg.num_kv_heads * cfg.head_dim * jnp.dtype(kv_dtype).itemsize,
        windows=tuple(kind.window for kind in cfg.layer_kinds),
    )


def floor_of(work: ModelWork, ceilings: Ceilings, requests: Lengths, num_rows: int) -> Floor:
    """Gives the least times of requests sent at once to an engine of so many rows."""
    num_outputs = sum(output for _, output in requests)
    num_tokens = sum(prompt + output - 1 for prompt, output in requests)  # nobody computes the last one
    pairs_of_prompts = sum(work.context_pairs(0, prompt) for prompt, _ in requests)
    pairs_of_outputs = sum(work.context_pairs(prompt, prompt + output - 1) for prompt, output in requests)
    flops = num_tokens * work.layer_flops + num_outputs * work.head_flops + pairs_of_prompts * work.pair_flops
    num_steps = max(-(-num_outputs // num_rows), max(output for _, output in requests))
    total = _step(num_steps * work.weight_bytes, flops, ceilings) + pairs_of_outputs * work.kv_bytes / ceilings.copy
    batch = min(len(requests), num_rows)
    num_decoded = max(num_outputs - len(requests), 1)
    mean_kv = pairs_of_outputs * work.kv_bytes / num_decoded
    tpot = _step(work.weight_bytes, batch * (work.layer_flops + work.head_flops), ceilings)
    return Floor(
        total=total,
        tpot=tpot + batch * mean_kv / ceilings.copy,
        ttft=_first(work, ceilings, requests[:batch]),
    )


def _first(work: ModelWork, ceilings: Ceilings, requests: Lengths) -> float:
    """The prompts of the requests that start together, in one step."""
    prompts = [prompt for prompt, _ in requests]
    flops = sum(prompts) * work.layer_flops + len(prompts) * work.head_flops
    flops += sum(work.context_pairs(0, prompt) for prompt in prompts) * work.pair_flops
    return _step(work.weight_bytes, flops, ceilings)


def _step(num_bytes: float, flops: float, ceilings: Ceilings) -> float:
    return max(num_bytes / ceilings.copy, flops / ceilings.matmul)


def _sum_to(end: int) -> int:
    """Keys of the tokens at positions [0, end): one, two, three and so on."""
    return end * (end + 1) // 2


def _sum_to_window(end: int, window: int) -> int:
    short = min(end, window)
    return _sum_to(short) + (end - short) * window
