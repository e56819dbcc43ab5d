"""The traced sampler: logits -> tokens and scores, one program per set of features in use. Knows arrays; no requests.

The order is vLLM's: allowed tokens, added numbers (bad words, min_tokens, logit_bias), the user's own functions,
penalties, temperature, min_p, top_k, top_p.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.config.logits_processor import LogitsProcessor
from jaxllm.engine.sampler_inputs import (
    ANY_TOKEN,
    WHOLE_VOCABULARY,
    ProcessorInputs,
    SamplerInputs,
    SamplerLayout,
    SamplerShape,
)
from jaxllm.engine.step import OfRank, RowState, StepProgram, over_mesh
from jaxllm.engine.vocab_ranks import exchange_logits, gather_rows, own_numbers, own_rows, sample_over_ranks
from jaxllm.kernels.sampling.reference import IN_PROMPT as IN_PROMPT
from jaxllm.kernels.sampling.reference import Edits, Filters, Penalties, best, process, rank, sample
from jaxllm.models.forward import Weights, project


class ScoreArrays[A](NamedTuple):
    """Scores of one token per row, its rank, the best ones ([B, num_best], or [B, V] in the vocabulary's order), and
    those of named tokens.
    """

    chosen: A  # [B] float32
    rank: A  # [B]
    best: A  # [B, K] float32
    best_token: A  # [B, K], or [0] with the whole vocabulary
    named: A  # [B, num_named] float32


class Sampled[A](NamedTuple):
    """What a sampler gives besides the new row state."""

    token: A  # [B]
    scores: ScoreArrays[A] | None


def make_sampler(program: StepProgram, layout: SamplerLayout, logprobs_mode: str) -> Callable:
    """Gives sample(logits, rows, packed) -> (Sampled, rows), to be jitted with rows donated.

    With penalties it is sample(logits, rows, counts, packed) -> (Sampled, rows, counts), counts donated too: [rows + 1,
    V] int32, occurrences in the output and the bit IN_PROMPT.
    """
    shape = layout.shape

    is_split, is_plain = program.mesh.shape["tensor"] > 1, shape == SamplerShape(shape.num_requests)

    def sampler(logits_BV: jax.Array, rows: RowState[jax.Array], *rest: jax.Array):
        counts, packed = rest if shape.penalties else (None, *rest)
        inputs, processor_inputs = layout.unpack(packed)
        if is_split and is_plain:
            drawing = (inputs.temperature, inputs.seed, inputs.position)
            token_B, scores = sample_over_ranks(logits_BV, *drawing), None
        else:
            whole_bV = exchange_logits(logits_BV, layout.vocab_size)
            own = _of_rank(layout, len(whole_bV), inputs, processor_inputs)
            answer = _answer(program.kernels.choose, logprobs_mode, whole_bV, rows, counts, *own)
            token_B, scores = gather_rows(answer, shape.num_requests)
        spare = rows.last_token.shape[0] - 1
        target_B = jnp.where(inputs.samples == 1, inputs.row, spare)
        rows = RowState(rows.last_token.at[target_B].set(token_B))
        if counts is None:
            return Sampled(token_B, scores), rows
        return Sampled(token_B, scores), rows, counts.at[target_B, token_B].add(1)

    states = (OfRank(),) * (3 if shape.penalties else 2)
    in_specs = (program.logits_spec(), *states)
    return over_mesh(program, "sampler", sampler, in_specs, out_specs=states)


def make_prompt_scorer(program: StepProgram, num_best: int, logprobs_mode: str) -> Callable:
    """Gives score(weights, hidden [T, D], index_and_token [2, N]) -> ScoreArrays of N tokens.

    The flat token `index` of a step is followed by `token` in its prompt. Only N rows of logits exist at once.
    """

    def scorer(weights: Weights, hidden_TD: jax.Array, index_and_token: jax.Array):
        logits_NV = project(program.decoder, program.kernels, weights, hidden_TD[index_and_token[0]])
        logits_NV = exchange_logits(logits_NV, program.decoder.cfg.vocab_size)
        token_N = own_rows(index_and_token[1])
        named_NJ = jnp.zeros((len(token_N), 0), jnp.int32)
        scores = score(logits_NV, token_N, num_best, named_NJ, logprobs_mode.endswith("logprobs"))
        return gather_rows(scores, index_and_token.shape[1])

    return over_mesh(program, "prompt_scorer", scorer, (program.weight_specs(), OfRank(), OfRank()), OfRank())


def score(
    logits_NV: jax.Array, token_N: jax.Array, num_best: int, named_NJ: jax.Array, as_logprobs: bool
) -> ScoreArrays[jax.Array]:
    """Scores the given tokens, the best ones and those named, as log-probabilities or as the logits themselves."""
    scores_NV = jax.nn.log_softmax(logits_NV, axis=-1) if as_logprobs else logits_NV
    chosen_N, rank_N = rank(scores_NV, token_N)
    if num_best == WHOLE_VOCABULARY:
        best_NK, token_NK = scores_NV, jnp.zeros((0,), jnp.int32)
    else:
        best_NK, token_NK = best(scores_NV, num_best)
    return ScoreArrays(chosen_N, rank_N, best_NK, token_NK, jnp.take_along_axis(scores_NV, named_NJ, axis=-1))


def _of_rank(
    layout: SamplerLayout,
    num_own: int,
    inputs: SamplerInputs[jax.Array],
    processor_inputs: dict[str, ProcessorInputs[jax.Array]],
) -> tuple[SamplerLayout, SamplerInputs[jax.Array], dict[str, ProcessorInputs[jax.Array]]]:
    """What concerns a tensor rank's own requests, of which there are so many."""
    fields = inputs._asdict().items()
    own = {name: field if name.startswith("edit_") else own_rows(field) for name, field in fields}
    own["edit_request"] = own_numbers(inputs.edit_request, num_own)
    processors = {
        name: each._replace(request=own_numbers(each.request, num_own)) for name, each in processor_inputs.items()
    }
    return layout._replace(shape=layout.shape._replace(num_requests=num_own)), SamplerInputs(**own), processors


def _answer(
    choose: Callable,
    logprobs_mode: str,
    logits_BV: jax.Array,
    rows: RowState[jax.Array],
    counts: jax.Array | None,
    layout: SamplerLayout,
    inputs: SamplerInputs[jax.Array],
    processor_inputs: dict[str, ProcessorInputs[jax.Array]],
) -> tuple[jax.Array, ScoreArrays[jax.Array] | None]:
    """Gives tokens and scores of requests whose rows of logits are whole."""
    raw_BV = logits_BV.astype(jnp.float32)
    rules = _rules(layout, inputs, rows.last_token[inputs.row], counts)
    edited_BV: jax.Array | None = None
    if layout.shape.processors:
        # The user's functions see masked and edited logits.
        edited_BV = process(raw_BV, inputs.temperature, rules.pop("mask"), rules.pop("edits"))
        for name, _ in layout.shape.processors:
            edited_BV = _process(layout.processors[name], edited_BV, processor_inputs[name], inputs, rows)
    return _choose(choose, layout.shape, logprobs_mode, raw_BV, edited_BV, inputs, rules)


def _choose(
    choose: Callable,
    shape: SamplerShape,
    logprobs_mode: str,
    raw_BV: jax.Array,
    edited_BV: jax.Array | None,
    inputs: SamplerInputs[jax.Array],
    rules: dict[str, Any],
) -> tuple[jax.Array, ScoreArrays[jax.Array] | None]:
    """Draws the tokens, and scores them in the way that is asked for. Only `processed` scores need all that is left."""
    drawing = (inputs.temperature, inputs.seed, inputs.position)
    as_logprobs = logprobs_mode.endswith("logprobs")
    if shape.has_scores and logprobs_mode.startswith("processed"):
        left_BV = process(raw_BV if edited_BV is None else edited_BV, inputs.temperature, **rules)
        token_B = sample(left_BV, *drawing)
        left_BV = left_BV / jnp.where(inputs.temperature == 0.0, 1.0, inputs.temperature)[:, None]
        return token_B, score(left_BV, token_B, shape.num_best, inputs.named, as_logprobs)
    if not shape.has_scores or shape.num_best == WHOLE_VOCABULARY:
        token_B, _ = choose(raw_BV, *drawing, logits=edited_BV, **rules)
        if not shape.has_scores:
            return token_B, None
        return token_B, score(raw_BV, token_B, shape.num_best, inputs.named, as_logprobs)
    token_B, told = choose(
        raw_BV, *drawing, logits=edited_BV, **rules, num_best=shape.num_best, as_logprobs=as_logprobs
    )
    named_BJ = jnp.take_along_axis(raw_BV, inputs.named, axis=-1)
    named_BJ = named_BJ - told.highest[:, None] - told.log_total[:, None]
    return token_B, ScoreArrays(told.chosen, told.rank, told.best, told.best_token, named_BJ)


def _rules(
    layout: SamplerLayout, inputs: SamplerInputs[jax.Array], last_token_B: jax.Array, counts: jax.Array | None
) -> dict[str, Any]:
    """The rules for choosing, as `choose` and `process` take them; None for those that no row uses."""
    shape = layout.shape
    edits = penalties = filters = None
    if shape.num_edits:
        last_E = last_token_B[jnp.minimum(inputs.edit_request, shape.num_requests - 1)]
        holds_E = (inputs.edit_if_last == ANY_TOKEN) | (inputs.edit_if_last == last_E)
        edits = Edits(inputs.edit_request, inputs.edit_token, jnp.where(holds_E, inputs.edit_value, 0.0))
    if counts is not None:
        penalties = Penalties(counts, inputs.row, inputs.repetition, inputs.frequency, inputs.presence)
    if shape.filters:
        filters = Filters(inputs.top_k, inputs.top_p, inputs.min_p)
    return {
        "mask": inputs.mask if shape.masked else None,
        "edits": edits,
        "penalties": penalties,
        "filters": filters,
    }


def _process(
    processor: LogitsProcessor,
    logits_BV: jax.Array,
    own: ProcessorInputs[jax.Array],
    inputs: SamplerInputs[jax.Array],
    rows: RowState[jax.Array],
) -> jax.Array:
    """Runs a user's function on the rows that ask for it; the others are not touched."""
    request_R = jnp.minimum(own.request, logits_BV.shape[0] - 1)
    row_R = inputs.row[request_R]
    facts = {"position": inputs.position[request_R], "last_token": rows.last_token[row_R]}
    processed_RV = jax.vmap(processor.function)(logits_BV[request_R], own.parameters | facts)
    return logits_BV.at[own.request].set(processed_RV.astype(jnp.float32), mode="drop")
