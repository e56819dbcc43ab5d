"""What turns a [B, V] batch of logits into tokens and scores, without sorting. Knows rows only; no requests, no text.

The noise of a token is a counter hash of (seed, position, vocabulary index), the same whatever else is in the batch.
`choose` is all of it in one: what a GPU version does in a few passes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

IN_PROMPT = 1 << 30  # the bit of a count that says the token occurs in the prompt

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class Edits(NamedTuple):
    """Numbers to add to single logits; those of requests from B on are unused."""

    request: Int[Array, " E"]
    token: Int[Array, " E"]
    value: Float[Array, " E"]


class Penalties(NamedTuple):
    """What `penalize` takes. Row `row[b]` of the counts: occurrences in request b's output, and the bit IN_PROMPT."""

    counts: Int[Array, "R V"]
    row: Int[Array, " B"]
    repetition: Float[Array, " B"]
    frequency: Float[Array, " B"]
    presence: Float[Array, " B"]


class Filters(NamedTuple):
    """What `keep_top` takes."""

    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]


class TokenScores(NamedTuple):
    """Scores of the chosen token and of the best. Any token's score is its logit minus `highest` minus `log_total`."""

    chosen: Float[Array, " B"]
    rank: Int[Array, " B"]
    best: Float[Array, "B k"]
    best_token: Int[Array, "B k"]
    highest: Float[Array, " B"]
    log_total: Float[Array, " B"]


def choose(
    raw: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    seed: UInt32[Array, "B 2"],
    position: Int[Array, " B"],
    *,
    logits: Float[Array, "B V"] | None = None,
    mask: UInt32[Array, "B W"] | None = None,
    edits: Edits | None = None,
    penalties: Penalties | None = None,
    filters: Filters | None = None,
    num_best: int | None = None,
    as_logprobs: bool = True,
) -> tuple[Int[Array, " B"], TokenScores | None]:
    """Draws a token of each row, and scores it by the raw logits unless num_best is None.

    What is drawn from are the `logits`, where they are not the raw ones, with mask, edits, penalties and filters.
    """
    processed = process(raw if logits is None else logits, temperature, mask, edits, penalties, filters)
    token = sample(processed, temperature, seed, position)
    if num_best is None:
        return token, None
    zero = jnp.zeros(raw.shape[0], jnp.float32)
    highest, log_total = normalizer(raw) if as_logprobs else (zero, zero)
    scores = raw - highest[:, None] - log_total[:, None]
    return token, TokenScores(*rank(scores, token), *best(scores, num_best), highest, log_total)


def process(
    logits: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    mask: UInt32[Array, "B W"] | None = None,
    edits: Edits | None = None,
    penalties: Penalties | None = None,
    filters: Filters | None = None,
) -> Float[Array, "B V"]:
    """Applies what is given, in this order; filtered tokens get -inf. The temperature is that of the filters."""
    if mask is not None:
        logits = allow(logits, mask)
    if edits is not None:
        logits = logits.at[edits.request, edits.token].add(edits.value, mode="drop")
    if penalties is not None:
        count_BV = penalties.counts[penalties.row]
        strengths = (penalties.repetition, penalties.frequency, penalties.presence)
        logits = penalize(logits, count_BV & (IN_PROMPT - 1), count_BV >= IN_PROMPT, *strengths)
    if filters is not None:
        logits = keep_top(logits, temperature, *filters)
    return logits


def normalizer(logits: Float[Array, "B V"]) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Gives the highest logit of each row, and the logarithm of the sum of exp(logit - highest)."""
    highest = logits.max(-1)
    return highest, jnp.log(jnp.exp(logits - highest[:, None]).sum(-1))


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
    drawn = jnp.argmax(_perturb(logits, temperature, seed, position), axis=-1).astype(jnp.int32)
    return jnp.where(temperature == 0.0, greedy(logits), drawn)


def greedy_of_part(logits: Float[Array, "B V"], first: Int[Array, ""]) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """The best of the tokens from `first` on, of which the logits are: what to compare parts by, and the token."""
    return logits.max(-1), first + greedy(logits)


def sample_of_part(
    logits: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    seed: UInt32[Array, "B 2"],
    position: Int[Array, " B"],
    first: Int[Array, ""],
) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """Draws among the tokens from `first` on as `greedy_of_part` chooses; the best part's is what `sample` draws."""
    perturbed = _perturb(logits, temperature, seed, position, first)
    return greedy_of_part(jnp.where(temperature[:, None] == 0.0, logits, perturbed), first)


def _perturb(logits, temperature, seed, position, first=None) -> Float[Array, "B V"]:
    # Below 1e-30 a quotient may be infinite, and equal to others; at 1e-30 a draw is as good as greedy.
    safe_temperature = jnp.where(temperature == 0.0, 1.0, jnp.maximum(temperature, 1e-30))[:, None]
    noise = gumbel_noise(seed, position, logits.shape[-1], first)
    return logits.astype(jnp.float32) / safe_temperature + noise


def penalize(
    logits: Float[Array, "B V"],
    num_output: Int[Array, "B V"],
    in_prompt: Bool[Array, "B V"],
    repetition: Float[Array, " B"],
    frequency: Float[Array, " B"],
    presence: Float[Array, " B"],
) -> Float[Array, "B V"]:
    """Makes tokens that have occurred less likely, or more so.

    Repetition (Keskar et al., 2019, arXiv:1909.05858) divides the positive logits of all tokens of prompt and output
    and multiplies the negative ones. Frequency is subtracted for each occurrence in the output, presence once.
    """
    factor = jnp.where((num_output > 0) | in_prompt, repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * num_output - presence[:, None] * (num_output > 0)


def allow(logits: Float[Array, "B V"], bits: UInt32[Array, "B W"]) -> Float[Array, "B V"]:
    """Gives -inf to every token whose bit is 0; the bit of token v is bit v % 32 of word v // 32."""
    kept_BWb = (bits[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.where(kept_BWb.reshape(logits.shape[0], -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)


def keep_top(
    logits: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"] | None = None,
) -> Float[Array, "B V"]:
    """Gives -inf to tokens of less than min_p times the best one's probability, then to all but the top_k best of
    what is left, then to all outside the nucleus of mass top_p of what is left.

    Probabilities are those of softmax(logits / temperature). The nucleus is that of Holtzman et al. (2020,
    arXiv:1904.09751), min_p that of Nguyen et al. (2024, arXiv:2407.01082). top_k <= 0, top_p >= 1 and min_p = 0 are
    off, and so are all at temperature 0. Equals at a threshold all stay.
    """
    V = logits.shape[-1]
    logits = logits.astype(jnp.float32)
    is_greedy = temperature == 0.0
    scaled = (logits - logits.max(-1, keepdims=True)) / jnp.where(is_greedy, 1.0, temperature)[:, None]
    order = _sortable(logits)
    keep = jnp.ones_like(logits, bool)
    if min_p is not None:
        keep = scaled >= least_scaled(temperature, min_p)[:, None]
    k = jnp.where((top_k <= 0) | is_greedy, V, jnp.minimum(top_k, V))
    k = jnp.minimum(k, keep.sum(-1))
    keep &= order >= _bisect(lambda mark: (keep & (order >= mark[:, None])).sum(-1) >= k, k.shape)[:, None]
    off = (top_p >= 1.0) | is_greedy
    mass = jnp.where(keep, jnp.exp(scaled), 0.0)
    wanted = top_p * mass.sum(-1)
    nucleus = _bisect(lambda mark: jnp.where(order >= mark[:, None], mass, 0.0).sum(-1) >= wanted, k.shape)
    nucleus = jnp.minimum(nucleus, order.max(-1))  # the best stays, also where a tiny top_p is 0 in float32
    keep &= off[:, None] | (order >= nucleus[:, None])
    return jnp.where(keep, logits, -jnp.inf)


def least_scaled(temperature: Float[Array, " B"], min_p: Float[Array, " B"]) -> Float[Array, " B"]:
    """The least (logit - best logit) / temperature that min_p leaves."""
    # A little below the logarithm: a token at the very threshold stays, whatever its rounding.
    least = jnp.log(jnp.maximum(min_p, 1e-30)) - 1e-6
    return jnp.where((temperature == 0.0) | (min_p <= 0.0), -jnp.inf, least)


def rank(scores: Float[Array, "B V"], token: Int[Array, " B"]) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """Gives each row's score of its token, and the token's rank: 1 for the best, equals share theirs."""
    own = jnp.take_along_axis(scores, token[:, None], axis=-1)
    return own[:, 0], (scores > own).sum(-1, dtype=jnp.int32) + 1


def best(scores: Float[Array, "B V"], k: int) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """Gives the k best scores of each row and their tokens, best first; of equals the lowest id first."""
    if k == 0:
        return jnp.zeros((scores.shape[0], 0), scores.dtype), jnp.zeros((scores.shape[0], 0), jnp.int32)
    scores = jnp.where(scores == 0.0, 0.0, scores)  # top_k puts -0.0 after 0.0
    values, tokens = jax.lax.platform_dependent(
        scores, cpu=lambda x: tuple(jax.lax.top_k(x, k)), default=lambda x: _best(x, k)
    )
    return values, tokens


def _best(scores: Float[Array, "B V"], k: int) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """One pass for each of the k; a GPU would sort the whole vocabulary instead."""
    place = jnp.arange(scores.shape[0])

    def take(i, carry):
        left, tokens = carry
        token = jnp.argmax(left, axis=-1).astype(jnp.int32)
        # 0 is below the order of -inf: a token is taken once, also where only forbidden ones are left.
        return left.at[place, token].set(0), tokens.at[:, i].set(token)

    _, tokens = jax.lax.fori_loop(0, k, take, (_sortable(scores), jnp.zeros((scores.shape[0], k), jnp.int32)))
    return jnp.take_along_axis(scores, tokens, axis=-1), tokens


def gumbel_noise(
    seed: UInt32[Array, "B 2"], position: Int[Array, " B"], num_tokens: int, first: Int[Array, ""] | None = None
) -> Float[Array, "B V"]:
    """Standard Gumbel noise, a pure function of (seed, position, vocabulary index).

    It is that of so many tokens from `first` on, or from 0.
    """
    token = jnp.arange(num_tokens, dtype=jnp.uint32)[None, :]
    if first is not None:
        token = token + first.astype(jnp.uint32)
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
