"""The last part of a step: logits -> tokens, one variant per set of features in use. Knows StepInputs; no requests."""

import jax

from jaxllm.engine.buckets import Variant
from jaxllm.engine.step_inputs import StepInputs
from jaxllm.kernels.sampling.reference import greedy, keep_top, sample


def choose_tokens(variant: Variant, logits_BV: jax.Array, inputs: StepInputs[jax.Array]) -> jax.Array:
    """Gives the next token of every row [B]; rows that don't sample get rubbish.

    The position that seeds the noise is that of the token being chosen, so a token's noise never depends on the batch.
    """
    if variant == "greedy":
        return greedy(logits_BV)
    if variant == "full":
        logits_BV = keep_top(logits_BV, inputs.temperature, inputs.top_k, inputs.top_p)
    return sample(logits_BV, inputs.temperature, inputs.seed, inputs.context_len)
