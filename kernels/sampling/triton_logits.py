"""What the sampling kernels have in common, in Triton: a token's logit under the rules, its noise, keys of one order.

Knows single elements. Every kernel computes the same logit anew, to the bit: what one finds, the next must find again.
"""

import triton
import triton.language as tl

G = 32  # tokens of a group: 128 bytes
NOWHERE = tl.constexpr(-(1 << 31))  # below the key of -inf
NO_TOKEN = tl.constexpr((1 << 31) - 1)
DRAWS_FROM_ALL = tl.constexpr(0)  # the modes of a row
DRAWS_FROM_LIST = tl.constexpr(1)  # top_k or min_p say how many groups to look at
DRAWS_FROM_NUCLEUS = tl.constexpr(2)  # top_p alone
_PROMPT_BIT = tl.constexpr(1 << 30)


@triton.jit
def sort_key(x):
    """Maps floats to signed integers of the same order; -0.0 is 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_key(key):
    """The float whose key this is."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def place(key, token):
    """A key and a token as one number: the larger the key, the larger it is; of equals the lowest token's first."""
    return (tl.full([], 0, tl.int64) + key << 32) | (token ^ NO_TOKEN)  # NO_TOKEN - token, of any integer up to it


@triton.jit
def placed_key(place):
    """The key in a place."""
    return (place >> 32).to(tl.int32)


@triton.jit
def placed_token(place):
    """The token in a place."""
    return (place & 0xFFFFFFFF).to(tl.int32) ^ NO_TOKEN  # not behind NO_TOKEN: Triton 3.9 interprets that wrongly


@triton.jit
def scale(x, highest, temperature):
    """The distance to the best logit over the temperature: the logarithm of a mass."""
    return tl.div_rn(x - highest, temperature)


@triton.jit
def divide(x, divisor):
    """The quotient by one scalar, rounded as a division rounds it, for the price of three multiplications."""
    inverse = tl.div_rn(1.0, divisor)
    guess = x * inverse
    quotient = tl.fma(tl.fma(guess, -divisor, x), inverse, guess)
    return tl.where(tl.abs(guess) < float("inf"), quotient, guess)


@triton.jit
def load_logits(logits, b, token, is_token, V: tl.constexpr):
    """Gives request b's logits of some tokens; -inf where there is no token."""
    return tl.load(logits + b.to(tl.int64) * V + token, mask=is_token, other=float("-inf"))


@triton.jit
def apply_rules(
    x,
    mask,
    edit_request,
    edit_token,
    edit_value,
    counts,
    row,
    repetition,
    frequency,
    presence,
    b,
    token,
    is_token,
    V: tl.constexpr,
    W: tl.constexpr,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
):
    """Gives request b's logits of some tokens under mask, edits and penalties."""
    if HAS_MASK:
        word = tl.load(mask + b.to(tl.int64) * W + token // 32, mask=is_token, other=0)
        x = tl.where((word >> (token % 32).to(tl.uint32)) & 1 == 1, x, float("-inf"))
    if E > 0:
        e_E = tl.arange(0, E_PADDED)
        request_E = tl.load(edit_request + e_E, mask=e_E < E, other=-1)
        if tl.max((request_E == b).to(tl.int32), 0) == 1:
            for e in range(E):
                if tl.load(edit_request + e) == b:
                    x += tl.where(token == tl.load(edit_token + e), tl.load(edit_value + e), 0.0)
    if HAS_PENALTIES:
        first = counts + tl.load(row + b).to(tl.int64) * V
        count = tl.load(first + token, mask=is_token, other=0)
        factor = tl.load(repetition + b)
        x = tl.where(count > 0, tl.where(x > 0, divide(x, factor), x * factor), x)
        num_output = count & (_PROMPT_BIT - 1)
        # Fused by hand: left to the compiler, one kernel might round twice and the next once.
        x = tl.fma(num_output.to(tl.float32), -tl.load(frequency + b), x)
        x = tl.where(num_output > 0, x - tl.load(presence + b), x)
    return x


@triton.jit
def perturb(x, temperature, seed, position, b, token):
    """The logits over the temperature, with the reference's Gumbel noise."""
    noise = gumbel_noise(tl.load(seed + b * 2), tl.load(seed + b * 2 + 1), tl.load(position + b), token)
    return divide(x, tl.maximum(temperature, 1e-30)) + noise


@triton.jit
def bound_perturbed(x, temperature, seed, position, b, token):
    """Numbers that `perturb` gives no more than, by less than 0.07 where the noise is large, for half of its price.

    Standard Gumbel noise is at most -log(r), r being the number from 0 to 1 that it is made of. A float's bits as an
    integer are its logarithm, or a little less.
    """
    bits = noise_bits(tl.load(seed + b * 2), tl.load(seed + b * 2 + 1), tl.load(position + b), token)
    logarithm = bits.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32) * (2.0**-23) - (127.0 + 32.0)
    inverse = tl.div_rn(1.0, tl.maximum(temperature, 1e-30))
    return tl.fma(logarithm, -0.6931471805599453, x * inverse)


@triton.jit
def loosen(bound):
    """The bound on perturbed logits with room for what was rounded."""
    return tl.where(tl.abs(bound) < float("inf"), bound + (tl.abs(bound) * 1e-5 + 1e-3), bound)


@triton.jit
def gumbel_noise(key0, key1, position, token):
    """Standard Gumbel noise of (seed, position, token), from the very bits of the reference."""
    rest = tl.minimum((noise_bits(key0, key1, position, token).to(tl.float32) + 0.5) * (2.0**-32), 1.0 - 2.0**-24)
    # log1p by Kahan's quotient, whose errors cancel; where 1 - rest rounds to 1, log1p(-rest) is -rest.
    kept = 1.0 - rest
    lost = 1.0 - kept
    ratio = tl.where(lost == 0.0, 1.0, rest / tl.where(lost == 0.0, 1.0, lost))
    exponential = tl.where(lost == 0.0, rest, -tl.log(kept) * ratio)
    return -tl.log(exponential)


@triton.jit
def noise_bits(key0, key1, position, token):
    """Threefry-2x32 with 20 rounds of (seed, position, token)."""
    key2 = key0 ^ key1 ^ 0x1BD11BDA
    x0 = position.to(tl.uint32) + key0
    x1 = token.to(tl.uint32) + key1
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = x0 + key1, x1 + (key2 + 1)
    x0, x1 = _four_rounds(x0, x1, 17, 29, 16, 24)
    x0, x1 = x0 + key2, x1 + (key0 + 2)
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = x0 + key0, x1 + (key1 + 3)
    x0, x1 = _four_rounds(x0, x1, 17, 29, 16, 24)
    x0, x1 = x0 + key1, x1 + (key2 + 4)
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    return x0 + key2


@triton.jit
def _four_rounds(x0, x1, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr):
    x0, x1 = _round(x0, x1, R0)
    x0, x1 = _round(x0, x1, R1)
    x0, x1 = _round(x0, x1, R2)
    return _round(x0, x1, R3)


@triton.jit
def _round(x0, x1, ROTATION: tl.constexpr):
    x0 = x0 + x1
    x1 = (x1 << ROTATION) | (x1 >> (32 - ROTATION))
    return x0, x0 ^ x1
