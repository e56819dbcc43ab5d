"""8-bit numbers (e4m3) to and from wider ones inside Triton kernels. Knows numbers; no caches, no attention.

From compute capability 8.9 on the card has instructions for it. Elsewhere, and in the interpreter, the bits of bytes
are moved by hand: to the same numbers, but that NaN becomes 480 on the way back.
"""

import triton
import triton.language as tl

from jaxllm.kernels.launch import capability, is_interpreted


def has_conversions() -> bool:
    """Tells whether kernels may use the card's own instructions."""
    return capability() >= 89 and not is_interpreted(to_bits)


@triton.jit
def as_numbers(pointer, HAS_CONVERSIONS: tl.constexpr):
    """Gives a pointer to bytes as one to e4m3 numbers where the card knows them; any other as it is."""
    if pointer.dtype.element_ty == tl.uint8 and HAS_CONVERSIONS:
        pointer = pointer.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    return pointer


@triton.jit
def to_bits(x):
    """Gives the bits of the nearest e4m3 numbers, ties to even, saturating; x is float32."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 8 x (127 - 7), between the exponents' biases
    # Below the least normal number the steps are 2^-9: added to 2^23, the sum's last bits count them.
    subnormal = (magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def narrowed(x, type: tl.constexpr):
    """Casts what is to be stored; in bytes it becomes the bits of e4m3. The card's own instruction saturates too."""
    if type == tl.uint8:
        y = to_bits(x.to(tl.float32))
    elif type.is_fp8():
        y = x.to(tl.float32).to(type)
    else:
        y = x.to(type)
    return y


@triton.jit
def widened(x, type: tl.constexpr):
    """Casts what was loaded; bytes are the bits of e4m3."""
    if x.dtype == tl.uint8:
        x = from_bits(x.to(tl.int32))
    return x.to(type)


@triton.jit
def from_bits(code):
    """Gives float16 of the bits of e4m3 in an int32's last byte: moved into place, they are 2^-8 of the number."""
    moved = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    return moved.to(tl.int16).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def unpacked(words, HAS_CONVERSIONS: tl.constexpr):
    """Gives the four e4m3 numbers of each int32 as four float16 arrays. Exact."""
    if HAS_CONVERSIONS:
        # By the pair: Triton's own cast takes an instruction for each number where the layout is unkind.
        a, b, c, d = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high; .reg .b32 first, last;
            mov.b32 {low, high}, $4; cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 last, high;
            mov.b32 {$0, $1}, first; mov.b32 {$2, $3}, last; }""",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        a, b, c, d = from_bits(words), from_bits(words >> 8), from_bits(words >> 16), from_bits(words >> 24)
    return a, b, c, d


@triton.jit
def as_float16(x):
    """Casts numbers of 16 bits to float16, saturating; float32 stays."""
    if x.dtype == tl.bfloat16:
        x = tl.clamp(x.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return x
