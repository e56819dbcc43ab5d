"""Greedy and random choice over a [B, V] batch of logits without sorting. Knows rows only; no requests, no tokenizer.

The noise of a token is a counter hash of (seed, position, vocabulary index), the same whatever else is in the batch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def greedy(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The best token of each row; the lowest id of equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(
    logits: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    seed: UInt32[Array, "B 2"],
    position: Int[Array, " B"],
) -> Int[Array, " B"]:
    """Draws from softmax(logits / temperature); rows of temperature 0 are greedy. -inf leaves a token out.

    The draw is the Gumbel-max trick (Gumbel, 1954).
    """
    # Below 1e-30 a quotient may be infinite, and equal to others; at 1e-30 a draw is as good as greedy.
    safe_temperature = jnp.where(temperature == 0.0, 1.0, jnp.maximum(temperature, 1e-30))[:, None]
    noise = gumbel_noise(seed, position, logits.shape[-1])
    drawn = jnp.argmax(logits.astype(jnp.float32) / safe_temperature + noise, axis=-1).astype(jnp.int32)
    return jnp.where(temperature == 0.0, greedy(logits), drawn)


def keep_top(
    logits: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
) -> Float[Array, "B V"]:
    """Gives -inf to every token outside the top_k best, and then outside the nucleus of mass top_p of what is left.

    The nucleus (Holtzman et al., 2020, arXiv:1904.09751) is that of softmax(logits / temperature). top_k <= 0 and
    top_p >= 1 are off, and so are both at temperature 0. Equals at the threshold all stay.
    """
    V = logits.shape[-1]
    logits = logits.astype(jnp.float32)
    order = _sortable(logits)
    k = jnp.where((top_k <= 0) | (temperature == 0.0), V, jnp.minimum(top_k, V))
    keep = order >= _bisect(lambda mark: (order >= mark[:, None]).sum(-1) >= k, k.shape)[:, None]
    off = (top_p >= 1.0) | (temperature == 0.0)
    scaled = (logits - logits.max(-1, keepdims=True)) / jnp.where(off, 1.0, temperature)[:, None]
    mass = jnp.where(keep, jnp.exp(scaled), 0.0)
    wanted = top_p * mass.sum(-1)
    nucleus = _bisect(lambda mark: jnp.where(order >= mark[:, None], mass, 0.0).sum(-1) >= wanted, k.shape)
    nucleus = jnp.minimum(nucleus, order.max(-1))  # the best stays, also where a tiny top_p is 0 in float32
    keep &= off[:, None] | (order >= nucleus[:, None])
    return jnp.where(keep, logits, -jnp.inf)


def gumbel_noise(seed: UInt32[Array, "B 2"], position: Int[Array, " B"], vocab_size: int) -> Float[Array, "B V"]:
    """Standard Gumbel noise, a pure function of (seed, position, vocabulary index)."""
    token = jnp.arange(vocab_size, dtype=jnp.uint32)[None, :]
    bits, _ = threefry2x32(seed[:, :1], seed[:, 1:], position.astype(jnp.uint32)[:, None], token)
    # One minus the uniform: floats are dense near 0, where the large noise that wins a draw comes from.
    rest = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-rest))


def threefry2x32(key0, key1, count0, count1):
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3")."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = count0 + keys[0], count1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation) | (x1 >> (32 - rotation))
            x1 = x0 ^ x1
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def _sortable(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Maps floats to unsigned integers of the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _bisect(enough, shape) -> UInt32[Array, " B"]:
    """The largest mark for which `enough` holds; it must hold for 0 and, once false, stay false."""

    def add_bit(i, mark):
        trial = mark | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(trial), trial, mark)

    return jax.lax.fori_loop(0, 32, add_bit, jnp.zeros(shape, jnp.uint32))
