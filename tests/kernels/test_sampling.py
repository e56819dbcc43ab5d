import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32
from scipy import stats

from jaxllm.kernels.sampling import reference
from jaxllm.kernels.sampling.reference import greedy, gumbel_noise, keep_top, sample, sample_of_part, threefry2x32

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sampling.json").read_text())
OTHERS_OFF = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
CASES = [case for case in GOLDEN["cases"] if all(case["params"][name] == off for name, off in OTHERS_OFF.items())]
LOGITS = [np.asarray(vector["logits"], np.float32) for vector in GOLDEN["vectors"]]
NUM_DRAWS = 20_000

draw = jax.jit(sample)
part_of = jax.jit(sample_of_part)
noise_of = jax.jit(gumbel_noise, static_argnums=2)
filtered = jax.jit(keep_top)


def rows(*values, dtype: type = np.float32):
    return jnp.asarray(np.asarray(values, dtype))


def seeds(count, start=0):
    """As a request's 64-bit seed is stored: low word, high word."""
    numbers = np.arange(start, start + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return jnp.asarray(np.stack([numbers & np.uint64(0xFFFFFFFF), numbers >> np.uint64(32)], -1).astype(np.uint32))


def test_threefry_gives_the_published_known_answers():
    for key, count, expected in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ):
        assert tuple(map(int, threefry2x32(*map(jnp.uint32, (*key, *count))))) == expected


def test_threefry_is_that_of_jax():
    count = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
    key = jnp.asarray([0xDEADBEEF, 7], jnp.uint32)
    ours = jnp.concatenate(threefry2x32(key[0], key[1], jnp.asarray(count[:32]), jnp.asarray(count[32:])))
    np.testing.assert_array_equal(ours, threefry_2x32(key, jnp.asarray(count)))


def test_greedy_takes_the_lowest_id_of_equals():
    logits = rows([0, 3, 3, 1], [2, 2, 2, 2], [-np.inf, -np.inf, -5, -5])
    assert greedy(logits).tolist() == [1, 0, 2]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['logits']}-T{case['params']['temperature']}"
    f"-k{case['params']['top_k']}-p{case['params']['top_p']}")  # fmt: skip
def test_what_is_kept_has_the_exact_distribution(case):
    params, logits = case["params"], LOGITS[case["logits"]]
    kept = filtered(
        logits[None], rows(params["temperature"]), rows(params["top_k"], dtype=np.int32), rows(params["top_p"])
    )
    kept = np.asarray(kept[0], np.float64)
    if params["temperature"] == 0.0:
        assert kept.argmax() == np.argmax(case["probs"])
        return
    assert np.isfinite(kept).sum() == case["num_nonzero"]
    probs = np.exp((kept - kept.max()) / params["temperature"])
    np.testing.assert_allclose(probs / probs.sum(), case["probs"], rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize(
    "index", [i for i, c in enumerate(CASES) if c["params"]["temperature"] and c["num_nonzero"] > 8]
)
def test_draws_follow_the_exact_distribution(index):
    case = CASES[index]
    params, B = case["params"], NUM_DRAWS
    kept = filtered(
        LOGITS[case["logits"]][None],
        rows(params["temperature"]),
        rows(params["top_k"], dtype=np.int32),
        rows(params["top_p"]),
    )
    # Half of the draws take a new seed each at one position, half are positions of one request.
    seed = jnp.concatenate([seeds(B // 2), jnp.broadcast_to(seeds(1, start=77 + index), (B // 2, 2))])
    position = jnp.concatenate([jnp.full(B // 2, index + 3), jnp.arange(B // 2)])
    temperature = jnp.full(B, params["temperature"], jnp.float32)
    tokens = np.asarray(draw(jnp.broadcast_to(kept, (B, kept.shape[1])), temperature, seed, position))
    for half in np.split(tokens, 2):
        assert p_value(half, np.asarray(case["probs"])) > 1e-4


def p_value(tokens, probs):
    """Of a chi-square test; tokens expected fewer than 5 times are counted together."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert not counts[probs == 0].any(), "a token of probability 0 was drawn"
    expected = probs * len(tokens)
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:
        counts, expected = counts[:-1], expected[:-1] * (len(tokens) - counts[-1]) / expected[:-1].sum()
    return float(stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(expected) - 1))


def test_the_chi_square_test_notices_a_wrong_distribution():
    probs = np.asarray(CASES[0]["probs"])
    wrong = np.random.default_rng(0).choice(len(probs), NUM_DRAWS // 2, p=(probs + 0.03 / len(probs)) / 1.03)
    assert p_value(wrong, probs) < 1e-4


def test_two_positions_and_two_seeds_are_independent():
    B = NUM_DRAWS
    logits, temperature = jnp.zeros((B, 4)), jnp.ones(B)
    first = np.asarray(draw(logits, temperature, seeds(B), jnp.zeros(B, jnp.int32)))
    for other in (
        draw(logits, temperature, seeds(B), jnp.ones(B, jnp.int32)),  # the next position
        draw(logits, temperature, seeds(B, start=1), jnp.zeros(B, jnp.int32)),  # the next seed
    ):
        assert p_value(first * 4 + np.asarray(other), np.full(16, 1 / 16)) > 1e-4


def test_the_noise_of_a_token_depends_on_its_own_seed_position_and_index_only():
    seed, position = seeds(5, start=11), jnp.asarray([0, 3, 3, 70_000, 9], jnp.int32)
    whole = np.asarray(noise_of(seed, position, 64))
    np.testing.assert_array_equal(noise_of(seed[3:4], position[3:4], 64), whole[3:4])
    np.testing.assert_array_equal(noise_of(seed[::-1], position[::-1], 17), whole[::-1, :17])
    assert len(np.unique(whole)) > 5 * 64 - 5


def test_both_halves_of_a_seed_matter():
    seed = jnp.asarray([[1, 2], [1, 3], [4, 2], [2, 1]], jnp.uint32)
    noise = np.asarray(noise_of(seed, jnp.zeros(4, jnp.int32), 32))
    assert len({row.tobytes() for row in noise}) == 4


def test_noise_is_finite_and_reaches_far_to_the_right():
    noise = np.asarray(noise_of(seeds(2000), jnp.zeros(2000, jnp.int32), 500))
    assert np.isfinite(noise).all()
    # The largest of a million is at 13.8 +- 1.3; noise from a 23-bit uniform would end at 16.
    assert 11.5 < noise.max() < 20
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.02


def test_greedy_rows_are_greedy_amid_sampled_ones():
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(6, 40)), jnp.float32)
    temperature = rows(0, 5, 0, 5, 5, 0)
    zeros = jnp.zeros(6, jnp.int32)
    kept = filtered(logits, temperature, zeros + 7, rows(*[0.5] * 6))
    np.testing.assert_array_equal(kept[::5], logits[::5])  # top_k and top_p are off at temperature 0
    best = greedy(logits)
    for position in range(8):
        tokens = draw(logits, temperature, seeds(6), zeros + position)
        np.testing.assert_array_equal(tokens[jnp.asarray([0, 2, 5])], best[jnp.asarray([0, 2, 5])])


def test_parts_of_the_vocabulary_choose_as_the_whole_does():
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(64, 48)).astype(np.float32)
    logits[:8, 7::8] = 9.0  # equals in several parts
    temperature = rows(*[0.0] * 16, *[1.3] * 48)
    drawing = (temperature, seeds(64), jnp.arange(64))
    for num_parts in (2, 3, 4):
        size = 48 // num_parts
        parts = [part_of(logits[:, i * size : (i + 1) * size], *drawing, jnp.int32(i * size)) for i in range(num_parts)]
        values, tokens = (np.stack(each) for each in zip(*parts, strict=True))
        assert tokens[values.argmax(0), np.arange(64)].tolist() == draw(logits, *drawing).tolist()


def test_the_best_are_distinct_and_the_same_on_every_platform():
    V = 12
    scores = rows(
        np.zeros(V),
        np.where(np.arange(V) == 7, 4.0, -np.inf),
        np.full(V, -np.inf),
        np.where(np.arange(V) % 2 == 0, 0.0, -0.0),
        np.round(np.random.default_rng(0).normal(size=V), 1) + 0.0,
    )
    expected = np.argsort(-np.asarray(scores), axis=-1, kind="stable")[:, :8]
    values, tokens = reference.best(scores, 8)
    assert tokens.tolist() == expected.tolist()
    np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(scores), expected, -1))
    on_gpu = reference._best(jnp.where(scores == 0.0, 0.0, scores), 8)
    assert on_gpu[1].tolist() == expected.tolist()
    np.testing.assert_array_equal(on_gpu[0], values)


def test_top_k_of_one_and_a_tiny_top_p_leave_the_best():
    logits = jnp.asarray(np.random.default_rng(6).normal(size=(4, 40)), jnp.float32)
    kept = filtered(logits, rows(1, 9, 1, 9), rows(1, 1, 0, 0, dtype=np.int32), rows(1, 1, 1e-6, 1e-45))
    assert np.isfinite(kept).sum(-1).tolist() == [1, 1, 1, 1]
    np.testing.assert_array_equal(greedy(kept), greedy(logits))


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1.2e-38, 1e-44])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = jnp.asarray(np.random.default_rng(7).normal(scale=20, size=(8, 40)), jnp.float32)
    hot = jnp.full(8, temperature, jnp.float32)
    kept = filtered(logits, hot, jnp.zeros(8, jnp.int32), jnp.full(8, 0.9))
    for candidates in (logits, kept):
        np.testing.assert_array_equal(draw(candidates, hot, seeds(8), jnp.arange(8)), greedy(logits))


def test_a_token_at_minus_infinity_is_never_drawn():
    logits = jnp.where(jnp.arange(32) % 2 == 0, -jnp.inf, 0.0) * jnp.ones((4000, 1))
    tokens = np.asarray(draw(logits, jnp.full(4000, 50.0), seeds(4000), jnp.zeros(4000, jnp.int32)))
    assert set(tokens.tolist()) == set(range(1, 32, 2))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_keep_top_keeps_what_a_sort_keeps(data):
    logits, options = [], []
    for row in range(4):
        rng = np.random.default_rng(data.draw(st.integers(0, 10**6), label=f"row {row}"))
        step = data.draw(st.sampled_from([0.0, 0.5, 2.0]), label="rounded to, for ties")
        values = rng.normal(scale=3, size=37)
        logits.append(values if step == 0.0 else np.round(values / step) * step)
        k = data.draw(st.sampled_from([-1, 0, 1, 2, 5, 36, 37, 1000]), label="k")
        p = data.draw(st.floats(0.01, 0.99) | st.just(1.0), label="p")
        options.append((data.draw(st.sampled_from([0.3, 1.0, 4.0]), label="T"), k, p))
    temperature, top_k, top_p = zip(*options, strict=True)
    table = np.asarray(logits, np.float32)
    kept = np.isfinite(filtered(table, rows(*temperature), rows(*top_k, dtype=np.int32), rows(*top_p)))
    for row in range(4):
        assert kept[row].tolist() in by_sorting(table[row].astype(np.float64), *options[row])


def by_sorting(logits, temperature, top_k, top_p):
    """What may be kept: one answer, or two where the mass at the threshold equals top_p but for rounding."""
    by_rank = np.sort(logits)[::-1]
    threshold = by_rank[top_k - 1] if 0 < top_k <= len(logits) else -np.inf
    kept = logits >= threshold
    if top_p >= 1.0:
        return [kept.tolist()]
    mass = np.where(kept, np.exp((logits - logits.max()) / temperature), 0.0)
    mass /= mass.sum()
    better = np.array([mass[logits > logit].sum() for logit in logits])  # a token stays while those before it lack mass
    return [(kept & (better < top_p + slack)).tolist() for slack in (-1e-6, 0.0, 1e-6)]
