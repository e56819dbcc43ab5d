"""Cases of choosing tokens, as a share of one pass over the logits at copy bandwidth."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.kernels.sampling import reference
from jaxllm.kernels.sampling.triton import SampleConfig, choose_with

from .timing import Runs, unique


@dataclass(frozen=True, slots=True)
class Plain:
    """Stands for the constants of the plain version, which has none."""


def sampler_runs(shrink: int) -> Iterator[Runs]:
    """Cases of choosing tokens; the share is that of one pass over the logits at copy bandwidth."""
    V = 128_256 // shrink
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("full", 256, {"rules": True, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "num_best": 8}),
        ("plain", 256, {}),
        ("filters", 256, {"top_k": 50, "top_p": 0.9}),
        ("logprobs", 256, {"num_best": 8}),
        ("top_p", 256, {"top_p": 0.9}),
        ("top_p, flat", 256, {"top_p": 0.9, "is_flat": True}),
        ("full", 8, {"rules": True, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "num_best": 8}),
    ]
    scans = [(2048, 4), (4096, 8), (1024, 4), (4096, 4), (2048, 8)]
    lists = [(1024, 8, 2048, 8), (1024, 16, 2048, 16), (512, 8, 1024, 8), (2048, 8, 4096, 8)]
    configs = [SampleConfig(), *(SampleConfig(*scan, *lists[0]) for scan in scans)]
    configs += [SampleConfig(*scans[0], *others) for others in lists]
    for name, B, options in cases:
        rows = max(1, B // shrink)
        yield sampler_run(f"sampler {name} {rows}x{V}", configs, rows, V, **options)
    for name, B, options in cases[:4]:
        rows = max(1, B // shrink)
        yield sampler_run(f"sampler {name} {rows}x{V}, plain XLA", [Plain()], rows, V, **options)


def sampler_run(
    name: str,
    configs: list,
    B: int,
    V: int,
    rules: bool = False,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    num_best: int | None = None,
    is_flat: bool = False,
) -> Runs:
    calls, buffers = 4, 2

    def make() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(4), 4)
        # Zipf's law in a random order, as of a text; or normal, with much of the vocabulary in the nucleus.
        uniform = jax.jit(lambda key: -1.5 * jnp.log(1 + V * jax.random.uniform(key, (B, V))))
        normal = jax.jit(lambda key: jax.random.normal(key, (B, V)))
        logits = [(normal if is_flat else uniform)(key) for key in jax.random.split(keys[0], buffers)]
        occurs = jax.random.uniform(keys[1], (B + 1, V)) < 0.01
        counts = jnp.where(occurs, jax.random.randint(keys[2], (B + 1, V), 0, 4), 0)
        counts |= jnp.where(occurs, reference.IN_PROMPT, 0)
        return *logits, counts, jax.random.bits(keys[3], (B, 2), jnp.uint32)

    def program(config: SampleConfig | Plain):
        def run(*arrays):
            *logits, counts, seed = arrays
            strengths = [jnp.full(B, value, jnp.float32) for value in (1.1, 0.2, 0.1)]
            penalties = reference.Penalties(counts, jnp.arange(B), *strengths) if rules else None
            filters = None
            if top_k or top_p < 1 or min_p:
                numbers = (jnp.full(B, top_p, jnp.float32), jnp.full(B, min_p, jnp.float32))
                filters = reference.Filters(jnp.full(B, top_k), *numbers)
            heat, token, told = jnp.full(B, 0.8), jnp.zeros(B, jnp.int32), []
            for call in range(calls):
                # Each call's position is the last one's token: none can begin before the other ends.
                drawing = (logits[call % buffers], heat, seed, token)
                given = {"penalties": penalties, "filters": filters, "num_best": num_best, "as_logprobs": True}
                if isinstance(config, Plain):
                    token, scores = reference.choose(*drawing, **given)
                else:
                    token, scores = choose_with(config, *drawing, logits=None, mask=None, edits=None, **given)
                told += [token, *([] if scores is None else (scores.rank, *scores.best_token.T))]
            return jnp.stack(told)

        return run

    return Runs(name, unique(configs), make, program, calls, lambda ceilings: (4 * B * V, ceilings.copy, "TB/s"))
