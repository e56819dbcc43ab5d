"""The sum of small parts over the GPUs of one process in one kernel, which writes into the others' memory.

Knows the addresses of the ranks' inboxes. Refuses to know whose memory that is, and large parts, which XLA adds up.

Each rank sends all its part to each other rank, so there is one way over NVLink and nothing to wait for twice. Every
32-bit word travels in one 64-bit store together with the number of the exchange: whoever reads the number has the word,
without fences or flags (NCCL's protocol LL; Hu et al., 2025, "Demystifying NCCL", arXiv:2507.04786). Words are added in
the ranks' order, so all ranks have the same sum, bit by bit.

An inbox has two places for each word of each rank, for odd and for even exchanges. A place is free again when its next
word comes: the sender has seen the exchange between, which the receiver began after it had read the place. This holds
for each chunk on its own, if exchanges follow each other on each GPU, as those of a chain of layers do.
"""

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Int, Shaped

from jaxllm.kernels.all_reduce import reference
from jaxllm.kernels.all_reduce.inbox import CHUNK, most_words, ranks_of
from jaxllm.kernels.launch import launch

TYPES = ("bfloat16", "float16", "float32", "int32")


@triton.jit
def exchange_words(
    part,
    residual,
    peers,
    num_words,
    out,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_WORDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Sends chunk program_id of the part to every other rank, and adds up what came from them and the own part."""
    TYPE: tl.constexpr = part.dtype.element_ty
    chunk = tl.program_id(0)
    word_C = chunk * CHUNK + tl.arange(0, CHUNK)
    is_word_C = word_C < num_words
    own = address(peers + 2)
    number, this = begin_exchange(own, chunk)
    sent_C = tl.load(part.to(tl.pointer_type(tl.int32), bitcast=True) + word_C, mask=is_word_C, other=0)
    send(peers, sent_C, word_C, this, R, CHUNK, MOST_WORDS)
    if HAS_RESIDUAL:
        kept_C = tl.load(residual.to(tl.pointer_type(tl.int32), bitcast=True) + word_C, mask=is_word_C, other=0)
    low_C = tl.zeros([CHUNK], tl.int32 if TYPE.is_int() else tl.float32)
    high_C = low_C
    for r in tl.static_range(R):
        received_C = part_of(r, sent_C, word_C, peers, own, this, R, CHUNK, MOST_WORDS)
        low_C += lower(received_C, TYPE)
        high_C += upper(received_C, TYPE)
    if HAS_RESIDUAL:
        low_C += lower(kept_C, TYPE)
        high_C += upper(kept_C, TYPE)
    tl.store(out.to(tl.pointer_type(tl.int32), bitcast=True) + word_C, joined(low_C, high_C, TYPE), mask=is_word_C)
    tl.store(number, this)


@triton.jit
def exchanged(sum_C, word_C, peers, own, this, R: tl.constexpr, CHUNK: tl.constexpr, MOST_WORDS: tl.constexpr):
    """The sum of all ranks' float32 numbers, for a kernel that has them in registers and began the exchange."""
    sent_C = sum_C.to(tl.int32, bitcast=True)
    send(peers, sent_C, word_C, this, R, CHUNK, MOST_WORDS)
    total_C = tl.zeros_like(sum_C)
    for r in tl.static_range(R):
        part_C = part_of(r, sent_C, word_C, peers, own, this, R, CHUNK, MOST_WORDS)
        total_C += part_C.to(tl.float32, bitcast=True)
    return total_C


@triton.jit
def begin_exchange(own, chunk):
    """Where the chunk's number is kept, and the number of this exchange."""
    number = own.to(tl.pointer_type(tl.int32), bitcast=True) + chunk
    return number, tl.load(number) + 1


@triton.jit
def send(peers, sent_C, word_C, this, R: tl.constexpr, CHUNK: tl.constexpr, MOST_WORDS: tl.constexpr):
    """Sends words to every other rank."""
    rank = tl.load(peers)
    marked_C = (this.to(tl.int64) << 32) | (sent_C.to(tl.int64) & 0xFFFFFFFF)
    for r in tl.static_range(R):
        if r != rank:
            tl.store(places(address(peers + 4 + 2 * r), (this & 1) * R + rank, MOST_WORDS, CHUNK) + word_C, marked_C)


@triton.jit
def part_of(r, sent_C, word_C, peers, own, this, R: tl.constexpr, CHUNK: tl.constexpr, MOST_WORDS: tl.constexpr):
    """What rank r sent; of this rank what it has. Ranks are asked in one order, so that all get the same sum."""
    part_C = sent_C
    if r != tl.load(peers):
        part_C = receive(places(own, (this & 1) * R + r, MOST_WORDS, CHUNK) + word_C, this)
    return part_C


@triton.jit
def address(words):
    """The address in two words, the lower first."""
    return (tl.load(words).to(tl.int64) & 0xFFFFFFFF) | (tl.load(words + 1).to(tl.int64) << 32)


@triton.jit
def places(inbox, sender, MOST_WORDS: tl.constexpr, CHUNK: tl.constexpr):
    """Where an inbox receives the words of a sender, in the exchanges of this parity."""
    first = (inbox + MOST_WORDS // CHUNK * 4).to(tl.pointer_type(tl.int64), bitcast=True)
    return tl.multiple_of(first + sender.to(tl.int64) * MOST_WORDS, 16)


@triton.jit
def receive(place_C, this):
    """Waits until all words of this exchange are there. Volatile: the multiprocessor's own cache is not asked."""
    marked_C = tl.load(place_C, volatile=True)
    while tl.max(((marked_C >> 32).to(tl.int32) != this).to(tl.int32)) != 0:
        marked_C = tl.load(place_C, volatile=True)
    return marked_C.to(tl.int32)


@triton.jit
def lower(word_C, TYPE: tl.constexpr):
    """The number in a word, or in its lower half, widened."""
    if TYPE.is_int():
        number_C = word_C
    elif TYPE.primitive_bitwidth == 32:
        number_C = word_C.to(TYPE, bitcast=True)
    else:
        number_C = (word_C & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return number_C


@triton.jit
def upper(word_C, TYPE: tl.constexpr):
    """The number in the upper half of a word; where there is none, the number."""
    return lower(word_C >> 16 if TYPE.primitive_bitwidth == 16 else word_C, TYPE)


@triton.jit
def joined(low_C, high_C, TYPE: tl.constexpr):
    """The word of one or two numbers, rounded to their type."""
    if TYPE.primitive_bitwidth == 32:
        word_C = low_C.to(tl.int32, bitcast=True)
    else:
        word_C = low_C.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word_C |= high_C.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return word_C


def all_reduce(
    part: Shaped[Array, "*S"], residual: Shaped[Array, "*S"] | None = None, *, peers: Int[Array, " W"] | None = None
) -> Shaped[Array, "*S"]:
    """Gives the sum of all ranks' parts, and the residual beside it; see the reference.

    `peers`: this rank, 0, the address of its inbox, and those of all ranks, each as two words, the lower first. Without
    them, and where a part is larger than there is place for or no whole number of words, XLA adds up.
    """
    num_bytes = part.size * part.dtype.itemsize
    if peers is None or part.dtype.name not in TYPES or num_bytes % 4 != 0:
        return reference.all_reduce(part, residual)
    num_words, num_ranks = num_bytes // 4, ranks_of(len(peers))
    if not 0 < num_words <= most_words(num_ranks):
        return reference.all_reduce(part, residual)
    (total,) = launch(
        exchange_words,
        part,
        part if residual is None else residual,
        peers,
        num_words,
        results=(jax.ShapeDtypeStruct(part.shape, part.dtype),),
        grid=-(-num_words // CHUNK),
        num_warps=4,
        R=num_ranks,
        CHUNK=CHUNK,
        MOST_WORDS=most_words(num_ranks),
        HAS_RESIDUAL=residual is not None,
    )
    return total
