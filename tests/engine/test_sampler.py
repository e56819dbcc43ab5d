"""The compiled sampler against the exact distributions, and what a row's token may depend on."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxllm import SamplingParams
from jaxllm.config.engine_args import engine_args
from jaxllm.config.logits_processor import LogitsProcessor
from jaxllm.engine.model_source import find_model
from jaxllm.engine.sampler import IN_PROMPT, make_sampler
from jaxllm.engine.sampler_inputs import ANY_TOKEN, WHOLE_VOCABULARY, ProcessorShape, SamplerLayout, SamplerShape
from jaxllm.engine.sampler_rows import token_mask
from jaxllm.engine.step import RowState, StepProgram
from jaxllm.kernels.sampling import reference
from jaxllm.kernels.sampling.reference import choose
from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.build import build_mesh
from jaxllm.models.decoder import Kernels
from jaxllm.models.forward import build_program

GOLDEN = Path(__file__).parents[1] / "golden"
SAMPLING = json.loads((GOLDEN / "sampling.json").read_text())
VECTORS = SAMPLING["vectors"]
V = SAMPLING["vocab_size"]
NUM_ROWS = 8
FILTERS = {"top_k", "top_p", "min_p"}
PENALTIES = {"repetition_penalty", "frequency_penalty", "presence_penalty"}
KERNELS = Kernels(*[len] * len(Kernels._fields))._replace(choose=choose)


def changed(case) -> list[str]:
    """The parameters of a case that are not the usual ones."""
    return [name for name, value in case["params"].items() if value != getattr(SamplingParams(), name)]


def name_of(case) -> str:
    return f"{case['logits']}-" + ("-".join(f"{name}={case['params'][name]}" for name in changed(case)) or "plain")


CASES = [pytest.param(case, id=name_of(case)) for case in SAMPLING["cases"]]


def worth_drawing() -> list:
    """One case for each set of parameters, of the flattest logits or, better, where the order of the filters matters.

    All values are held against the exact probabilities below; what is left to be told is the draw from these.
    """
    cases = [case for case in SAMPLING["cases"] if max(case["probs"]) < 1.0]
    cases = [case for case in cases if case["logits"] == 1 or "probs_min_p_first" in case]
    cases.sort(key=lambda case: "probs_min_p_first" in case)
    return list({tuple(changed(case)): case for case in cases}.values())


@pytest.fixture(scope="module")
def program():
    source = find_model(engine_args({"model": str(GOLDEN / "llama")}))
    assert source.family is not None
    cfg = source.family.configure(source.hf_config)
    assert cfg.vocab_size == V
    return StepProgram(build_program(cfg), KERNELS, build_mesh(), AxisRules(), 16)


@pytest.fixture(scope="module")
def sampler(program):
    """Gives a jitted sampler and how to run it: fields by name, one value for all rows or one each."""
    made = {}

    def run(shape: SamplerShape, logits, *, mode="processed_logprobs", processors=None, own=None, **fields):
        layout = SamplerLayout(shape, V, processors or {})
        key = (shape, mode)
        if key not in made:
            options = {"xla_backend_optimization_level": 3} if shape.num_requests > 100 else None  # runs long
            made[key] = jax.jit(make_sampler(program, layout, mode), compiler_options=options)
        packed = np.zeros(layout.packed_size, np.int32)
        inputs, processor_inputs = layout.host_views(packed)
        defaults = {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0, "samples": 1}
        defaults |= {"edit_request": shape.num_requests, "edit_if_last": ANY_TOKEN, "mask": 0xFFFFFFFF}
        last_token = fields.pop("last_token", np.zeros(NUM_ROWS + 1, np.int32))
        counts = fields.pop("counts", None)
        for name, value in (defaults | fields).items():
            view = getattr(inputs, name)
            if view.size:
                view[:] = value
        for name, (request, parameters) in (own or {}).items():
            processor_inputs[name].request[:] = request
            for parameter, value in parameters.items():
                processor_inputs[name].parameters[parameter][:] = value
        state = [RowState(jnp.asarray(last_token, jnp.int32))] + ([] if counts is None else [jnp.asarray(counts)])
        logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (shape.num_requests, V))
        # One data rank, whose axis comes first.
        stacked = jax.tree.map(lambda array: array[None], (logits, *state, jnp.asarray(packed)))
        return jax.tree.map(lambda array: array[0], made[key](*stacked))

    return run


def golden_fields(case, num_rows: int = NUM_ROWS + 1) -> dict:
    """A case's numbers, its row's counts in row 0, and its logits."""
    params, vector = case["params"], VECTORS[case["logits"]]
    counts = np.zeros((num_rows, V), np.int32)
    counts[0, vector["prompt_ids"]] = IN_PROMPT
    np.add.at(counts[0], vector["output_ids"], 1)
    return {
        "logits": vector["logits"],
        "counts": counts,
        "row": 0,
        "temperature": params["temperature"],
        "top_k": params["top_k"],
        "top_p": params["top_p"],
        "min_p": params["min_p"],
        "repetition": params["repetition_penalty"],
        "frequency": params["frequency_penalty"],
        "presence": params["presence_penalty"],
    }


@pytest.mark.parametrize("case", CASES)
def test_the_sampler_draws_from_the_exact_distribution(sampler, case):
    shape = SamplerShape(1, filters=True, penalties=True, num_best=WHOLE_VOCABULARY)
    (token, scores), *_ = sampler(shape, **golden_fields(case))
    expected = np.asarray(case.get("probs_min_p_first", case["probs"]))
    if case["params"]["temperature"] == 0.0:
        assert token[0] == expected.argmax()
        return
    probs = np.exp(np.asarray(scores.best[0], np.float64))
    assert (probs > 0).tolist() == (expected > 0).tolist()
    np.testing.assert_allclose(probs, expected, rtol=5e-5, atol=1e-9)
    assert expected[token[0]] > 0
    np.testing.assert_allclose(np.exp(scores.chosen[0]), expected[token[0]], rtol=5e-5)
    assert scores.rank[0] == (expected > expected[token[0]]).sum() + 1


@pytest.mark.slow
@pytest.mark.parametrize("case", worth_drawing(), ids=name_of)
def test_a_hundred_thousand_draws_follow_the_exact_distribution(sampler, case):
    B, rounds = 5000, 20
    filters, penalties = (not asked.isdisjoint(changed(case)) for asked in (FILTERS, PENALTIES))
    shape = SamplerShape(B, filters=filters, penalties=penalties)
    fields = golden_fields(case)
    fields |= {} if penalties else {"counts": None}
    expected = np.asarray(case.get("probs_min_p_first", case["probs"]))
    seeds = np.arange(1, 2 * B + 1, dtype=np.uint32).reshape(B, 2) * np.uint32(2654435761)
    counts = np.zeros(V, np.int64)
    for position in range(rounds):
        (token, _), *_ = sampler(shape, **fields, seed=seeds, position=1000 + position, samples=0)
        counts += np.bincount(np.asarray(token), minlength=V)
    assert counts.sum() == 100_000
    assert not counts[expected == 0].any()
    often = expected * counts.sum() >= 5
    seen, wanted = counts[often].tolist(), (expected[often] * counts.sum()).tolist()
    if wanted and (rest := counts.sum() - sum(wanted)) >= 5:
        seen, wanted = [*seen, counts[~often].sum()], [*wanted, rest]
    if len(wanted) > 1:
        scale = sum(seen) / sum(wanted)
        assert stats.chisquare(seen, [w * scale for w in wanted]).pvalue > 1e-5


def test_a_row_is_greedy_at_temperature_zero_whatever_else_it_asks(sampler):
    shape = SamplerShape(4, filters=True)
    (token, scores), _ = sampler(shape, VECTORS[1]["logits"], temperature=0.0, top_k=5, top_p=0.3, min_p=0.5)
    assert token.tolist() == [int(np.argmax(VECTORS[1]["logits"]))] * 4
    assert scores is None


def test_a_token_depends_on_its_request_and_not_on_its_place_in_the_batch(sampler):
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2, size=(8, V)).astype(np.float32)
    fields = {
        "temperature": np.array([1, 0, 2, 1, 3, 1, 0.5, 1], np.float32),
        "top_k": np.array([0, 5, 0, 9, 2, 0, 0, 7]),
        "min_p": np.array([0, 0, 0.1, 0, 0, 0.01, 0, 0], np.float32),
        "seed": rng.integers(0, 2**32, (8, 2), dtype=np.uint32),
        "position": np.arange(8) * 3,
        "row": np.arange(8),
    }
    shape = SamplerShape(8, filters=True)
    straight, _ = sampler(shape, logits, **fields)
    order = rng.permutation(8)
    mixed, _ = sampler(shape, logits[order], **{name: value[order] for name, value in fields.items()})
    assert mixed.token.tolist() == np.asarray(straight.token)[order].tolist()
    plain, _ = sampler(SamplerShape(8), logits, **{k: v for k, v in fields.items() if k not in ("top_k", "min_p")})
    unfiltered, _ = sampler(shape, logits, **fields | {"top_k": 0, "min_p": 0.0})
    assert plain.token.tolist() == unfiltered.token.tolist()  # a neighbour's filters change nothing


def test_the_chosen_token_is_remembered_for_rows_that_sample_only(sampler):
    shape = SamplerShape(4)
    logits = np.full((4, V), -9.0)
    logits[np.arange(4), [10, 20, 30, 40]] = 9.0
    last = np.arange(100, 100 + NUM_ROWS + 1)
    _, rows = sampler(shape, logits, temperature=0.0, row=[3, 0, 5, NUM_ROWS], samples=[1, 0, 1, 0], last_token=last)
    assert rows.last_token[:NUM_ROWS].tolist() == [100, 101, 102, 10, 104, 30, 106, 107]


def test_edits_add_to_single_logits_and_may_depend_on_the_last_token(sampler):
    shape = SamplerShape(2, filters=True, num_edits=64)
    logits = np.zeros((2, V))
    logits[:, 7], logits[:, 8] = 5.0, 4.0
    edits: dict[str, list] = {"edit_request": [0, 1, 1] + [2] * 61, "edit_token": [7, 7, 9] + [0] * 61}
    edits |= {"edit_if_last": [50, 50, ANY_TOKEN] + [0] * 61, "edit_value": [-np.inf, -np.inf, 4.5] + [99.0] * 61}
    last = np.zeros(NUM_ROWS + 1, np.int32)
    last[4] = 50
    sampled, _ = sampler(shape, logits, temperature=0.0, row=[4, 5], last_token=last, **edits)
    assert sampled.token.tolist() == [8, 7]  # row 4 ends in 50, row 5 does not
    edits["edit_value"][2] = 5.5
    sampled, _ = sampler(shape, logits, temperature=0.0, row=[4, 5], last_token=last, **edits)
    assert sampled.token.tolist() == [8, 9]


def test_a_mask_leaves_listed_tokens_only(sampler):
    logits = np.random.default_rng(3).normal(size=(2, V))
    allowed = [0, 31, 32, 63, 64, 319]
    mask = np.stack([token_mask(allowed, V), np.full(V // 32, 0xFFFFFFFF, np.uint32)])
    shape = SamplerShape(2, filters=True, masked=True, num_best=WHOLE_VOCABULARY)
    sampled, _ = sampler(shape, logits, mask=mask)
    assert np.flatnonzero(np.isfinite(sampled.scores.best[0])).tolist() == allowed
    assert np.isfinite(sampled.scores.best[1]).all()


def test_a_processor_runs_for_the_rows_that_ask_for_it_only(sampler):
    def after_last(logits, parameters):  # forces the token that follows the last one, `step` further
        token = (parameters["last_token"] + parameters["step"] + 0 * parameters["position"]) % V
        return jnp.where(jnp.arange(V) == token, 1e4, logits)

    processors = {"after": LogitsProcessor(function=after_last, parameters={"step": 1})}
    shape = SamplerShape(4, filters=True, processors=(ProcessorShape("after", 2),))
    last = np.arange(20, 20 + NUM_ROWS + 1)
    logits = np.zeros((4, V))
    logits[:, 3] = 1.0
    sampled, _ = sampler(
        shape,
        logits,
        temperature=0.0,
        row=[5, 6, 7, 0],
        last_token=last,
        processors=processors,
        own={"after": ([2, 4], {"step": [10, 0]})},  # the second is unused: it names request B
    )
    assert sampled.token.tolist() == [3, 3, 37, 3]


def test_scores_are_of_the_raw_or_of_the_processed_logits(sampler):
    logits = np.random.default_rng(4).normal(size=(1, V)).astype(np.float32)
    shape = SamplerShape(1, filters=True, num_best=8, num_named=16)
    named = np.zeros((1, 16), np.int32)
    named[0, :2] = 17, 4
    wanted = {
        "raw_logits": logits[0],
        "raw_logprobs": logits[0] - np.log(np.exp(logits[0]).sum()),
        "processed_logits": np.where(logits[0] >= np.sort(logits[0])[-5], logits[0] / 2, -np.inf),
    }
    for mode, expected in wanted.items():
        (token, scores), _ = sampler(shape, logits, mode=mode, temperature=2.0, top_k=5, seed=7, named=named)
        np.testing.assert_allclose(scores.chosen[0], expected[token[0]], rtol=1e-5)
        np.testing.assert_allclose(scores.named[0, :2], expected[[17, 4]], rtol=1e-5)
        order = np.argsort(-logits[0])[: 5 if mode == "processed_logits" else 8]
        assert scores.best_token[0, : len(order)].tolist() == order.tolist()
        np.testing.assert_allclose(scores.best[0, : len(order)], expected[order], rtol=1e-5)


@pytest.mark.parametrize("k", [0, 1, 5, 37])
def test_the_best_are_the_same_by_passes_and_by_the_platforms_own_way(k):
    scores = jnp.asarray(np.round(np.random.default_rng(8).normal(size=(5, 37)), 1) + 0.0, jnp.float32)  # with equals
    order = np.argsort(-np.asarray(scores), axis=-1, kind="stable")[:, :k]
    for best in (reference.best, reference._best) if k else (reference.best,):
        values, tokens = jax.jit(best, static_argnums=1)(scores, k)
        assert tokens.tolist() == order.tolist()
        np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(scores), order, -1))


ON_MESHES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jaxllm.config.engine_args import engine_args
from jaxllm.config.logits_processor import LogitsProcessor
from jaxllm.engine.model_source import find_model
from jaxllm.engine.sampler import IN_PROMPT, make_sampler
from jaxllm.engine.sampler_inputs import ANY_TOKEN, WHOLE_VOCABULARY, ProcessorShape, SamplerLayout, SamplerShape
from jaxllm.engine.step import RowState, StepProgram
from jaxllm.kernels.sampling.reference import choose
from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.build import build_mesh
from jaxllm.models.decoder import Kernels
from jaxllm.models.forward import build_program

source = find_model(engine_args({"model": sys.argv[1]}))
decoder = build_program(source.family.configure(source.hf_config))
rng = np.random.default_rng(0)
B, V = 5, decoder.cfg.vocab_size
logits = rng.normal(scale=2, size=(B, V)).astype(np.float32)
logits[0, [7, 300]] = 99.0  # equals on two ranks: the lower id is the best
counts = np.where(rng.random((B + 1, V)) < 0.2, 2, 0) + np.where(rng.random((B + 1, V)) < 0.2, IN_PROMPT, 0)
rows = RowState(rng.integers(0, V, B + 1).astype(np.int32))
kernels = Kernels(*[len] * len(Kernels._fields))._replace(choose=choose)
mine = LogitsProcessor(
    function=lambda x, p: x.at[(p["last_token"] + p["step"]) % V].add(3.0 + 0 * p["position"]), parameters={"step": 1}
)

def packed(layout):
    shape, array = layout.shape, np.zeros(layout.packed_size, np.int32)
    inputs, own = layout.host_views(array)
    given = {"row": [4, 0, 3, 1, 2], "samples": 1, "position": range(B), "temperature": [0, 1.3, 1, 0.7, 2]}
    given |= {"seed": rng.integers(0, 2**32, (B, 2)), "top_k": [0, 20, 0, 7, 0], "top_p": [1, 0.9, 1, 0.8, 0.99]}
    given |= {"min_p": [0, 0, 0.05, 0, 0], "repetition": [1, 1.2, 1, 2, 0.9], "frequency": 0.1, "presence": 0.2}
    given |= {"mask": rng.integers(0, 2**32, inputs.mask.shape), "named": rng.integers(0, V, inputs.named.shape)}
    edits = rng.integers(0, B + 1, inputs.edit_request.shape)  # the last number is no request
    given |= {"edit_request": edits, "edit_token": rng.integers(0, V, edits.shape), "edit_if_last": ANY_TOKEN}
    given |= {"edit_value": rng.normal(scale=5, size=edits.shape)}
    for name, value in given.items():
        if getattr(inputs, name).size:
            getattr(inputs, name)[:] = value
    for each in own.values():
        each.request[:], each.parameters["step"][:] = [3, B], [5, 9]
    return array

def run(layout, mode, array, data, tensor):
    program = StepProgram(decoder, kernels, build_mesh(data, tensor), AxisRules(), 16)
    padded = np.pad(logits, ((0, 0), (0, program.logits_width - V)), constant_values=-np.inf)
    states = (padded, rows, counts.astype(np.int32), array) if layout.shape.penalties else (padded, rows, array)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * data), states)
    return jax.tree.map(np.asarray, jax.jit(make_sampler(program, layout, mode))(*stacked))

plain, all_of_it = SamplerShape(B), SamplerShape(B, True, True, 64, True, 8, 16, (ProcessorShape("mine", 2),))
for shape, mode, meshes in (
    (plain, "raw_logprobs", [(1, 2), (2, 3), (4, 1)]),
    (SamplerShape(B, filters=True, num_best=WHOLE_VOCABULARY), "raw_logprobs", [(2, 4)]),
    (all_of_it, "raw_logprobs", [(1, 8)]),
    (all_of_it, "processed_logits", [(1, 3)]),
):
    layout = SamplerLayout(shape, V, {"mine": mine})
    array = packed(layout)
    alone = run(layout, mode, array, 1, 1)
    tokens = alone[0].token[0].tolist()
    for mesh in meshes:
        for whole, here in zip(jax.tree.leaves(alone), jax.tree.leaves(run(layout, mode, array, *mesh)), strict=True):
            for rank in range(mesh[0]):
                if whole.dtype == np.int32:
                    np.testing.assert_array_equal(here[rank], whole[0], f"{shape} on {mesh}")
                else:
                    np.testing.assert_allclose(here[rank], whole[0], rtol=1e-5, err_msg=f"{shape} on {mesh}")
        print(tokens[0] == 7 or shape is all_of_it, len(set(tokens)) > 3)
"""


def test_the_same_tokens_and_scores_are_told_on_every_mesh(golden, run_program):
    """Those of plain rows, which each tensor rank draws among its own tokens, and all else, on exchanged rows."""
    assert run_program(ON_MESHES, golden / "llama", num_devices=8) == "True True\n" * 6
