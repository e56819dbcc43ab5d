"""The traced sampler: logits -> tokens and scores, one program per set of features in use. Knows arrays; no requests.

The order is vLLM's: allowed tokens, added numbers (bad words, min_tokens, logit_bias), the user's own functions,
penalties, temperature, min_p, top_k, top_p.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxllm.config.logits_processor import LogitsProcessor
from jaxllm.engine.sampler_inputs import ANY_TOKEN, WHOLE_VOCABULARY, ProcessorInputs, SamplerInputs, SamplerLayout
from jaxllm.engine.step import RowState, StepProgram, over_mesh
from jaxllm.kernels.sampling.reference import allow, best, keep_top, penalize, rank, sample
from jaxllm.models.forward import Weights, project

IN_PROMPT = 1 << 30  # the bit of a count that says the token occurs in the prompt


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

    def sampler(logits_BV: jax.Array, rows: RowState[jax.Array], *rest: jax.Array):
        counts, packed = rest if shape.penalties else (None, *rest)
        inputs, processor_inputs = layout.unpack(packed)
        raw_BV = logits_BV.astype(jnp.float32)
        logits_BV = _edit(layout, raw_BV, inputs, rows.last_token[inputs.row])
        for name, _ in shape.processors:
            logits_BV = _process(layout.processors[name], logits_BV, processor_inputs[name], inputs, rows)
        if counts is not None:
            count_BV = counts[inputs.row]
            logits_BV = penalize(
                logits_BV,
                count_BV & (IN_PROMPT - 1),
                count_BV >= IN_PROMPT,
                inputs.repetition,
                inputs.frequency,
                inputs.presence,
            )
        if shape.filters:
            logits_BV = keep_top(logits_BV, inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p)
        token_B = sample(logits_BV, inputs.temperature, inputs.seed, inputs.position)
        scores = None
        if shape.has_scores:
            if logprobs_mode.startswith("processed"):
                raw_BV = logits_BV / jnp.where(inputs.temperature == 0.0, 1.0, inputs.temperature)[:, None]
            scores = score(raw_BV, token_B, shape.num_best, inputs.named, logprobs_mode.endswith("logprobs"))
        spare = rows.last_token.shape[0] - 1
        target_B = jnp.where(inputs.samples == 1, inputs.row, spare)
        rows = RowState(rows.last_token.at[target_B].set(token_B))
        if counts is None:
            return Sampled(token_B, scores), rows
        return Sampled(token_B, scores), rows, counts.at[target_B, token_B].add(1)

    whole = PartitionSpec()
    states = (whole,) * (3 if shape.penalties else 2)
    return over_mesh(program, sampler, in_specs=(*states, whole), out_specs=states)


def make_prompt_scorer(program: StepProgram, num_best: int, logprobs_mode: str) -> Callable:
    """Gives score(weights, hidden [T, D], index_and_token [2, N]) -> ScoreArrays of N tokens.

    The flat token `index` of a step is followed by `token` in its prompt. Only N rows of logits exist at once.
    """

    def scorer(weights: Weights, hidden_TD: jax.Array, index_and_token: jax.Array):
        logits_NV = project(program.decoder, program.kernels, weights, hidden_TD[index_and_token[0]])
        named_NJ = jnp.zeros((index_and_token.shape[1], 0), jnp.int32)
        return score(logits_NV, index_and_token[1], num_best, named_NJ, logprobs_mode.endswith("logprobs"))

    whole = PartitionSpec()
    return over_mesh(program, scorer, (program.weight_specs(), whole, whole), whole)


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


def _edit(
    layout: SamplerLayout, logits_BV: jax.Array, inputs: SamplerInputs[jax.Array], last_token_B: jax.Array
) -> jax.Array:
    if layout.shape.masked:
        logits_BV = allow(logits_BV, inputs.mask)
    if layout.shape.num_edits:
        B = logits_BV.shape[0]
        last_E = last_token_B[jnp.minimum(inputs.edit_request, B - 1)]
        holds_E = (inputs.edit_if_last == ANY_TOKEN) | (inputs.edit_if_last == last_E)
        value_E = jnp.where(holds_E, inputs.edit_value, 0.0)
        logits_BV = logits_BV.at[inputs.edit_request, inputs.edit_token].add(value_E, mode="drop")
    return logits_BV


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
