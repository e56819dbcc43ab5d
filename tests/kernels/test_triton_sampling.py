"""The Triton version of `choose` against its reference: in Triton's interpreter, and on a GPU."""

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxllm.kernels.launch import poisoned_results
from jaxllm.kernels.sampling import reference
from jaxllm.kernels.sampling.reference import IN_PROMPT, Edits, Filters, Penalties

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sampling.json").read_text())


def choose_both(raw, temperature, seed=0, num_best=None, as_logprobs=True, **rules):
    """What the Triton version and the reference choose; temperature and position may be one for all rows."""
    raw = jnp.asarray(raw, jnp.float32)
    B = raw.shape[0]
    rng = np.random.default_rng(seed)
    seeds = jnp.asarray(rng.integers(0, 2**32, (B, 2), dtype=np.uint32))
    position = jnp.asarray(rng.integers(0, 100_000, B), jnp.int32)
    drawing = (raw, jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (B,)), seeds, position)
    return tuple(
        jax.tree.map(np.asarray, compiled(name, num_best, as_logprobs)(*drawing, rules))
        for name in ("triton", "reference")
    )


@functools.cache
def compiled(name, num_best, as_logprobs):
    """A jitted version, which takes the rules as one more argument: compiled once for each set of them."""
    version = importlib.import_module(f"jaxllm.kernels.sampling.{name}").choose

    def run(*arguments):
        with poisoned_results():
            return version(*arguments[:-1], num_best=num_best, as_logprobs=as_logprobs, **arguments[-1])

    return jax.jit(run)


def check(*arguments, **options):
    """Both choose the same tokens, and tell the same of them; gives the tokens."""
    (token, scores), (expected_token, expected_scores) = choose_both(*arguments, **options)
    assert token.tolist() == expected_token.tolist()
    if expected_scores is not None:
        for name, found, expected in zip(scores._fields, scores, expected_scores, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5, err_msg=name)
    return token


def filters(B, top_k=0, top_p=1.0, min_p=0.0):
    """Each a number for all rows, or a list that is repeated."""
    return Filters(
        jnp.asarray(np.resize(top_k, B), jnp.int32),
        jnp.asarray(np.resize(top_p, B), jnp.float32),
        jnp.asarray(np.resize(min_p, B), jnp.float32),
    )


def penalties(rng, B, V):
    """Counts of more rows than there are, in another order."""
    counts = np.where(rng.random((B + 3, V)) < 0.1, rng.integers(1, 5, (B + 3, V)), 0)
    counts |= np.where(rng.random((B + 3, V)) < 0.1, IN_PROMPT, 0)
    return Penalties(
        jnp.asarray(counts, jnp.int32),
        jnp.asarray(rng.permutation(B + 3)[:B], jnp.int32),
        *(jnp.asarray(rng.uniform(low, high, B), jnp.float32) for low, high in ((0.8, 1.5), (-0.5, 1), (-0.5, 1))),
    )


def draw_logits(rng, B, V, spread=3.0):
    return rng.normal(scale=spread, size=(B, V)).astype(np.float32)


MIXED = {"top_k": [20, 0, 300, 1, 0], "top_p": [0.9, 1.0, 0.5], "min_p": [0.1, 0, 0.001, 0]}
FILTERS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": [5, 1, 64]},
    "top_p": {"top_p": [0.9, 0.3, 0.999, 1e-45]},
    "min_p": {"min_p": [0.1, 0.5, 1.0]},
    "mixed": MIXED,
    "off": {},
}


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("V", [320, 37, 4099])
@pytest.mark.parametrize("name", [*FILTERS, "none"])
def test_filtered_rows_draw_what_the_reference_draws(name, V):
    rng = np.random.default_rng(V)
    B = 6
    rules = {} if name == "none" else {"filters": filters(B, **FILTERS[name])}
    check(draw_logits(rng, B, V), np.resize([1.0, 0.7, 0.0, 2.0], B), seed=V, **rules)


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"top_p": [0.95, 0.5, 0.99]},
        {"top_k": [100, 400, 3], "top_p": [0.9, 1.0, 0.3]},
        {"top_k": [0, 200], "top_p": 0.4, "min_p": [1e-4, 0.01, 0.1]},
    ],
    ids=str,
)
def test_rows_that_keep_more_than_a_tile_draw_what_the_reference_draws(options):
    B, V = 6, 1500
    rng = np.random.default_rng(3)
    raw = jnp.asarray(np.concatenate([draw_logits(rng, 4, V, 1.5), np.round(draw_logits(rng, 2, V, 1.0))]))
    triton = importlib.import_module("jaxllm.kernels.sampling.triton")
    config = triton.SampleConfig(chunk=256, draw_tile=128)
    rules = {"filters": filters(B, **options), "penalties": penalties(rng, B, V)}
    drawing = (
        raw,
        jnp.asarray([1.0, 0.7, 2.0, 1.3, 1.0, 0.5], jnp.float32),
        jnp.asarray(rng.integers(0, 2**32, (B, 2), dtype=np.uint32)),
        jnp.arange(B),
    )
    with poisoned_results():
        token, _ = triton.choose_with(
            config, *drawing, logits=None, mask=None, edits=None, **rules, num_best=None, as_logprobs=True
        )
    assert token.tolist() == reference.choose(*drawing, **rules)[0].tolist()


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("V", [320, 2051])
def test_all_rules_together_and_scores_are_those_of_the_reference(V):
    rng = np.random.default_rng(V)
    B = 5
    logits = draw_logits(rng, B, V)
    rules = {
        "mask": jnp.asarray(rng.integers(0, 2**32, (B, -(-V // 32)), dtype=np.uint32)),
        "edits": Edits(
            jnp.asarray([0, 0, 1, 4, B, B], jnp.int32),
            jnp.asarray([3, 5, 7, V - 1, 1, 1], jnp.int32),
            jnp.asarray([9, -np.inf, 20, 30, 99, 99], jnp.float32),
        ),
        "penalties": penalties(rng, B, V),
    }
    temperature = np.asarray([1.0, 0.0, 0.6, 3.0, 1.0])
    check(logits, temperature, num_best=8, filters=filters(B, **MIXED), **rules)
    check(logits, temperature, num_best=0, **rules)
    check(logits, temperature, num_best=8, as_logprobs=False, filters=filters(B, top_p=0.8), **rules)
    check(logits, temperature, num_best=8, logits=jnp.asarray(logits[::-1]), filters=filters(B, top_k=9))


@pytest.mark.interpreter
@pytest.mark.gpu
def test_many_edits_are_applied_too():
    rng = np.random.default_rng(0)
    B, V, E = 3, 700, 600
    edits = Edits(
        jnp.asarray(rng.integers(0, B + 1, E), jnp.int32),
        jnp.asarray(rng.permutation(V)[:E], jnp.int32),
        jnp.asarray(rng.normal(size=E) * 5, jnp.float32),
    )
    check(draw_logits(rng, B, V), 1.0, num_best=0, edits=edits, filters=filters(B, top_k=10))


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-3, 1e-20, 1e-38, 50.0, 1e30])
def test_any_temperature_is_that_of_the_reference(temperature):
    logits = draw_logits(np.random.default_rng(1), 4, 320, spread=20)
    for options in ({}, {"filters": filters(4, top_p=0.9)}, {"filters": filters(4, **MIXED)}):
        check(logits, temperature, **options)


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [0, 1, 40])
def test_rows_of_equals_and_of_minus_infinity(top_k):
    V = 320
    rows = np.stack([
        np.zeros(V),
        np.where(np.arange(V) % 7 == 3, 0.0, -np.inf),
        np.where(np.arange(V) == 11, 4.0, -np.inf),
        np.where(np.arange(V) % 2 == 0, 1.0, 2.0),
        np.full(V, -1e30),
        np.where(np.arange(V) % 2 == 0, 0.0, -0.0),
    ])  # fmt: skip
    for temperature in (1.0, 0.0):
        check(rows, temperature, num_best=8, filters=filters(len(rows), top_k=top_k))
        check(rows, temperature, filters=filters(len(rows), top_k=top_k, top_p=0.5, min_p=0.05))
    for seed in range(4):
        token = check(rows, 1.0, seed=seed, num_best=0)
        assert token[1] % 7 == 3
        assert token[2] == 11


@pytest.mark.interpreter
@pytest.mark.gpu
def test_a_row_that_forbids_every_token_gives_the_first():
    raw = np.full((2, 320), -np.inf)
    given: tuple[dict[str, Any], ...] = (
        {},
        {"filters": filters(2, top_k=5)},
        {"filters": filters(2, top_p=0.5, min_p=0.1)},
    )
    for options in given:
        (token, _), _ = choose_both(raw, 1.0, **options)
        assert token.tolist() == [0, 0]


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("num_best", [1, 8, 32, 37])
def test_the_best_tokens_come_in_order_and_of_equals_the_lowest_first(num_best):
    logits = np.round(np.random.default_rng(8).normal(size=(4, 37)), 1) + 0.0
    (_, scores), _ = choose_both(logits, 0.0, num_best=num_best, as_logprobs=False)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :num_best]
    assert scores.best_token.tolist() == order.tolist()
    np.testing.assert_array_equal(scores.best, np.take_along_axis(logits.astype(np.float32), order, -1))


@pytest.mark.interpreter
@pytest.mark.gpu
def test_the_rank_counts_the_better_ones():
    logits = draw_logits(np.random.default_rng(2), 8, 2500, spread=0.5)
    (token, scores), _ = choose_both(logits, 5.0, num_best=0)
    own = logits[np.arange(8), token]
    assert scores.rank.tolist() == ((logits > own[:, None]).sum(-1) + 1).tolist()
    assert scores.rank.max() > 1000  # hot draws reach far down


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(GOLDEN["cases"])))
def test_golden_cases_draw_tokens_of_the_exact_support(index):
    case = GOLDEN["cases"][index]
    params, vector = case["params"], GOLDEN["vectors"][case["logits"]]
    B, V = 4, GOLDEN["vocab_size"]
    counts = np.zeros((1, V), np.int32)
    counts[0, vector["prompt_ids"]] = IN_PROMPT
    np.add.at(counts[0], vector["output_ids"], 1)
    strengths = [params[f"{name}_penalty"] for name in ("repetition", "frequency", "presence")]
    token = check(
        np.broadcast_to(np.asarray(vector["logits"], np.float32), (B, V)),
        params["temperature"],
        seed=index,
        penalties=Penalties(
            jnp.asarray(counts), jnp.zeros(B, jnp.int32), *(jnp.full(B, value, jnp.float32) for value in strengths)
        ),
        filters=filters(B, params["top_k"], params["top_p"], params["min_p"]),
    )
    expected = np.asarray(case.get("probs_min_p_first", case["probs"]))
    assert (expected[token] > 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("V", [128_256, 151_936, 50_257])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_a_whole_vocabulary_gives_what_the_reference_gives(V, spread):
    rng = np.random.default_rng(V)
    B = 40
    logits = draw_logits(rng, B, V, spread)
    temperature = np.resize([1.0, 0.7, 0.0, 1.3], B)
    check(logits, temperature, num_best=8)
    for options in FILTERS.values():
        check(logits, temperature, filters=filters(B, **options))
    check(logits, temperature, num_best=32, penalties=penalties(rng, B, V), filters=filters(B, **MIXED))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"top_k": 300}, {"top_p": 0.6}, {"min_p": 0.05}], ids=str)
def test_draws_from_a_whole_vocabulary_follow_the_exact_distribution(options):
    V, B, rounds = 128_256, 1000, 20
    row = np.random.default_rng(1).normal(scale=2.5, size=V).astype(np.float32)
    given = filters(1, **options)
    kept = np.asarray(reference.keep_top(jnp.asarray(row)[None], jnp.ones(1), *given)[0], np.float64)
    probs = np.exp(kept - kept.max())
    probs /= probs.sum()
    counts = np.zeros(V, np.int64)
    raw = jnp.broadcast_to(jnp.asarray(row), (B, V))
    triton = importlib.import_module("jaxllm.kernels.sampling.triton")
    draw = jax.jit(lambda *drawing: triton.choose(*drawing, filters=filters(B, **options) if options else None)[0])
    rng = np.random.default_rng(2)
    for position in range(rounds):
        seed = jnp.asarray(rng.integers(0, 2**32, (B, 2), dtype=np.uint32))
        counts += np.bincount(draw(raw, jnp.ones(B), seed, jnp.full(B, position, jnp.int32)), minlength=V)
    assert counts.sum() == B * rounds
    assert not counts[probs == 0].any()
    # Tokens by falling probability, in bins of at least 20 expected draws.
    order = np.argsort(-probs)
    bins = np.minimum((probs[order].cumsum() * B * rounds / 20).astype(int), B * rounds // 20 - 1)
    expected = np.bincount(bins, probs[order]) * B * rounds
    seen = np.bincount(bins, counts[order])
    often = expected > 10
    assert stats.chisquare(seen[often], expected[often] * seen[often].sum() / expected[often].sum()).pvalue > 1e-5
