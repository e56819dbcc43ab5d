"""Logits whose vocabulary lies split over the tensor ranks: choices compared, rows exchanged, answers gathered.

Knows arrays with an axis of requests, and the tensor axis; no rules of sampling. R ranks, each with b = B / R requests,
rounded up. docs/adr/0010 says how much is exchanged, and why in this way.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.kernels.sampling.reference import greedy, greedy_of_part, sample_of_part
from jaxllm.models.tensor_axis import first_of_rank


def gather(own: jax.Array) -> jax.Array:
    """Stacks what each rank has [...], for all of them [R, ...]."""
    return jax.lax.all_gather(own, "tensor")


def gather_by_sum(all_reduce: Callable[[jax.Array], jax.Array], own: jax.Array) -> jax.Array:
    """The same for 32-bit integers, out of a sum in which each rank has zeros but for its own."""
    places = jnp.zeros((jax.lax.axis_size("tensor"), *own.shape), own.dtype)
    return all_reduce(places.at[jax.lax.axis_index("tensor")].set(own))


def greedy_over_ranks(logits_BV: jax.Array, gather: Callable[[jax.Array], jax.Array] = gather) -> jax.Array:
    """The best token of each row; the lowest id of equals."""
    if jax.lax.axis_size("tensor") == 1:
        return greedy(logits_BV)
    return _best_of_ranks(*greedy_of_part(logits_BV, first_of_rank(logits_BV.shape[1])), gather)


def sample_over_ranks(
    logits_BV: jax.Array, temperature_B: jax.Array, seed_B2: jax.Array, position_B: jax.Array
) -> jax.Array:
    """Draws from the whole vocabulary what `sample` would: the noise is that of each token's own id."""
    first = first_of_rank(logits_BV.shape[1])
    return _best_of_ranks(*sample_of_part(logits_BV, temperature_B, seed_B2, position_B, first))


def _best_of_ranks(
    value_B: jax.Array, token_B: jax.Array, gather: Callable[[jax.Array], jax.Array] = gather
) -> jax.Array:
    both_R2B = gather(jnp.stack([_words(value_B), token_B]))
    # Ranks follow each other in the vocabulary's order: the first of equals has the lowest id.
    winner_B = jnp.argmax(jax.lax.bitcast_convert_type(both_R2B[:, 0], jnp.float32), axis=0)
    return jnp.take_along_axis(both_R2B[:, 1], winner_B[None], axis=0)[0]


def exchange_logits(logits_BV: jax.Array, vocab_size: int) -> jax.Array:
    """Gives each rank the whole rows [b, vocab_size] of its own requests, for its part of every request's row."""
    num_ranks = jax.lax.axis_size("tensor")
    if num_ranks == 1:
        return logits_BV
    padded_BV = _padded(logits_BV, num_ranks)
    return jax.lax.all_to_all(padded_BV, "tensor", split_axis=0, concat_axis=1, tiled=True)[:, :vocab_size]


def own_rows(array: jax.Array) -> jax.Array:
    """Cuts the rank's own requests [b, ...] out of an array that has all [B, ...]; an empty one says nothing."""
    num_ranks = jax.lax.axis_size("tensor")
    if num_ranks == 1 or not len(array):
        return array
    padded = _padded(array, num_ranks)
    num_own = len(padded) // num_ranks
    return jax.lax.dynamic_slice_in_dim(padded, first_of_rank(num_own), num_own)


def own_numbers(request: jax.Array, num_own: int) -> jax.Array:
    """Numbers of requests among the rank's own; b, which is none, for those of other ranks."""
    if jax.lax.axis_size("tensor") == 1:
        return request
    own = request - first_of_rank(num_own)
    return jnp.where((own >= 0) & (own < num_own), own, num_own)


def gather_rows(tree: Any, num_requests: int) -> Any:
    """Gives every rank the arrays of all requests, where each has those [b, ...] of its own. One exchange for all."""
    if jax.lax.axis_size("tensor") == 1:
        return tree
    arrays, structure = jax.tree.flatten(tree)
    words = [_words(array).reshape(len(array), -1) for array in arrays if len(array)]
    gathered = jax.lax.all_gather(jnp.concatenate(words, axis=1), "tensor", tiled=True)[:num_requests]
    told, start = [], 0
    for array in arrays:
        if not len(array):  # it says nothing
            told.append(array)
            continue
        size = array.size // len(array)
        own = gathered[:, start : start + size].reshape(num_requests, *array.shape[1:])
        told.append(jax.lax.bitcast_convert_type(own, array.dtype))
        start += size
    return structure.unflatten(told)


def _words(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.int32)


def _padded(array: jax.Array, num_ranks: int) -> jax.Array:
    """With rows of zeros behind, so that each rank has as many."""
    return jnp.pad(array, ((0, -len(array) % num_ranks), *((0, 0),) * (array.ndim - 1)))
