"""The attention cases that every version of paged_attention must pass, and the plain answer to them.

A GPU version's tests take the same fixtures: `attention_case` for the inputs, `dense_attention` for what must come out.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """A ragged batch: request b brings the last `new[b]` of its `context[b]` tokens."""

    name: str
    new: tuple[int, ...]
    context: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)  # query, KV
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    num_padding: int = 0  # tokens behind the last request; in a decode batch, whole rows
    spare_width: int = 0  # columns of the block table that no request fills
    scale: float | None = None  # the usual one

    @property
    def options(self) -> dict[str, Any]:
        """What paged_attention takes by name, and dense_attention too."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return {"scale": scale, "window": self.window, "softcap": self.softcap, "sinks": self.sinks}

    @property
    def sinks(self) -> np.ndarray | None:
        """A logit for each query head: some that take most of the weight, some that take little, one that is none."""
        if not self.has_sinks:
            return None
        sinks = np.random.default_rng(len(self.name)).permutation(np.linspace(-3, 6, self.heads[0]))
        sinks[0] = -np.inf
        return sinks.astype(np.float32)


class AttentionInputs(NamedTuple):
    """What paged_attention takes, in its order, as numpy arrays."""

    query: np.ndarray
    kv_cache: np.ndarray
    layer: int
    block_table: np.ndarray
    query_start: np.ndarray
    context_len: np.ndarray


CASES = (
    AttentionCase(name="one_token", new=(1,), context=(1,), heads=(2, 2), num_padding=2),
    AttentionCase(name="no_requests", new=(0, 0), context=(0, 0), num_padding=19, spare_width=2),  # an idle data rank
    AttentionCase(name="decode_of_no_requests", new=(1, 1), context=(0, 0), spare_width=2),
    AttentionCase(name="mha_prefill", new=(7, 1, 19), context=(7, 1, 19), heads=(3, 3), head_dim=80, block_size=8),
    AttentionCase(
        name="gqa4_chunks_mid_context_and_empty_rows",
        new=(5, 0, 33, 1, 0, 17, 0),
        context=(40, 0, 33, 29, 0, 64, 0),
        heads=(8, 2),
        num_padding=11,
        spare_width=3,
    ),
    AttentionCase(
        name="gqa7_over_several_key_tiles",
        new=(16, 1, 3),
        context=(600, 513, 256),
        heads=(14, 2),
        block_size=32,
        num_padding=1,
    ),
    AttentionCase(
        name="gqa8_big_blocks", new=(9, 2), context=(140, 129), heads=(8, 1), head_dim=80, block_size=128, num_padding=5
    ),
    AttentionCase(
        name="decode_with_padding_rows",
        new=(1, 1, 1, 1),
        context=(1, 256, 257, 530),
        heads=(8, 2),
        num_padding=3,
        spare_width=2,
    ),
    AttentionCase(
        name="decode_window_and_softcap",
        new=(1, 1, 1),
        context=(9, 400, 600),
        heads=(7, 1),
        block_size=8,
        window=7,
        softcap=3.0,
        num_padding=1,
    ),
    AttentionCase(
        name="decode_window_from_one_key_tile_into_the_next",
        new=(1, 1),
        context=(258, 262),
        heads=(2, 1),
        window=7,
        num_padding=1,
    ),
    AttentionCase(name="window_of_one", new=(4, 20), context=(12, 20), window=1, num_padding=4),
    AttentionCase(
        name="window_across_key_tiles", new=(20, 3, 1), context=(530, 8, 300), window=270, block_size=32, num_padding=2
    ),
    AttentionCase(name="window_beyond_the_context", new=(6, 18), context=(20, 30), window=1000, num_padding=3),
    AttentionCase(name="room_for_any_batch", new=(10,) * 4, context=(160,) * 4, heads=(2, 1), block_size=8),
    AttentionCase(
        name="mixed_mha_of_64", new=(21, 1, 4), context=(90, 77, 4), heads=(3, 3), head_dim=64, num_padding=2
    ),
    AttentionCase(
        name="mixed_gqa7_of_128_with_a_window",
        new=(40, 1, 2, 3),
        context=(170, 300, 131, 3),
        heads=(7, 1),
        head_dim=128,
        block_size=64,
        window=100,
        num_padding=3,
    ),
    AttentionCase(
        name="mixed_of_96_in_blocks_of_128", new=(1, 70), context=(260, 200), head_dim=96, block_size=128, num_padding=1
    ),
    AttentionCase(name="mixed_of_256", new=(1, 20), context=(100, 70), head_dim=256, softcap=20.0, num_padding=1),
    AttentionCase(
        name="decode_of_skewed_lengths",
        new=(1,) * 6,
        context=(1, 900, 16, 0, 17, 300),
        heads=(16, 2),
        block_size=32,
        num_padding=1,
    ),
    AttentionCase(
        name="decode_of_80_with_a_window",
        new=(1, 1, 1),
        context=(150, 1, 37),
        heads=(8, 2),
        head_dim=80,
        block_size=32,
        window=40,
        num_padding=1,
    ),
    AttentionCase(
        name="decode_gqa7_of_96",
        new=(1, 1),
        context=(140, 3),
        heads=(7, 1),
        head_dim=96,
        block_size=64,
        softcap=20.0,
        scale=0.3,
    ),
    AttentionCase(name="decode_mha_of_128", new=(1, 1), context=(130, 257), heads=(2, 2), head_dim=128, block_size=128),
    AttentionCase(name="decode_gqa8_of_256", new=(1, 1), context=(70, 200), heads=(8, 1), head_dim=256, block_size=8),
    AttentionCase(  # the longest context takes several chunks, which must count the sink once
        name="decode_of_64_with_sinks",
        new=(1,) * 5,
        context=(1, 900, 16, 129, 17),
        heads=(8, 2),
        head_dim=64,
        has_sinks=True,
        num_padding=1,
    ),
    AttentionCase(  # many new tokens, few on several chunks, few on one chunk, none
        name="mixed_gqa7_with_sinks_and_a_window",
        new=(40, 1, 2, 0, 1),
        context=(170, 700, 131, 0, 5),
        heads=(7, 1),
        head_dim=64,
        block_size=64,
        window=400,
        has_sinks=True,
        num_padding=3,
    ),
    AttentionCase(
        name="mixed_mha_with_sinks_and_a_softcap",
        new=(21, 1),
        context=(60, 150),
        heads=(3, 3),
        head_dim=80,
        block_size=8,
        softcap=4.0,
        has_sinks=True,
        num_padding=2,
        scale=0.3,
    ),
    AttentionCase(name="softcap_prefill", new=(33, 2), context=(33, 140), softcap=0.5, head_dim=80, num_padding=1),
)

_LAYERS, _LAYER = 3, 1


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def attention_case(request: pytest.FixtureRequest) -> AttentionCase:
    return request.param


@pytest.fixture(scope="session")
def attention_cases() -> tuple[AttentionCase, ...]:
    return CASES


@pytest.fixture(scope="session")
def case_named() -> Callable[[str], AttentionCase]:
    return lambda name: next(case for case in CASES if case.name == name)


@pytest.fixture(scope="session")
def make_attention_inputs() -> Callable[..., AttentionInputs]:
    return build_inputs


@pytest.fixture(scope="session")
def dense_attention() -> Callable[..., np.ndarray]:
    return dense


def build_inputs(case: AttentionCase, dtype: type = np.float32) -> AttentionInputs:
    """Random inputs; every slot that the batch must not read holds a huge number: block 0, blocks that no table names,
    the rest of each last block, the other layers."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    (N, K), H, C = case.heads, case.head_dim, case.block_size
    poison = 1e30 if float(jnp.finfo(dtype).max) > 1e30 else 6e4
    new, context = list(case.new), list(case.context)
    is_decode = set(new) == {1} and len(new) > 1
    if is_decode:
        context += [0] * case.num_padding
    per_request = [-(-length // C) for length in context]
    num_blocks = sum(per_request) + 4
    kv_cache = np.full((_LAYERS, num_blocks, 2, K, C, H), poison)
    block_table = np.zeros((len(context), max(per_request) + case.spare_width), np.int32)
    free = list(rng.permutation(np.arange(1, num_blocks)))
    for b, length in enumerate(context):
        for m in range(per_request[b]):
            block = block_table[b, m] = free.pop()
            used = min(C, length - m * C)
            kv_cache[_LAYER, block, :, :, :used] = rng.normal(size=(2, K, used, H))
    query_start = np.arange(len(context) + 1) if is_decode else np.concatenate([[0], np.cumsum(new)])
    query = rng.normal(size=(sum(new) + case.num_padding, N, H))
    return AttentionInputs(
        query.astype(dtype),
        kv_cache.astype(dtype),
        _LAYER,
        block_table,
        query_start.astype(np.int32),
        np.asarray(context, np.int32),
    )


def dense(
    inputs: AttentionInputs,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Softmax attention in float64, a request, a token and a head at a time; rows of padding are NaN."""
    query, kv_cache = inputs.query.astype(np.float64), inputs.kv_cache[inputs.layer].astype(np.float64)
    group, C = query.shape[1] // kv_cache.shape[2], kv_cache.shape[3]
    out = np.full(query.shape, np.nan)
    for b, length in enumerate(inputs.context_len):
        start, stop = inputs.query_start[b], inputs.query_start[b + 1]
        if length == 0:
            continue
        slots = [(inputs.block_table[b, p // C], p % C) for p in range(length)]
        keys = np.stack([kv_cache[block, 0, :, offset] for block, offset in slots])
        values = np.stack([kv_cache[block, 1, :, offset] for block, offset in slots])
        for i in range(start, stop):
            position = length - (stop - i)
            oldest = 0 if window is None else max(0, position - window + 1)
            for n in range(query.shape[1]):
                scores = keys[oldest : position + 1, n // group] @ query[i, n] * scale
                if softcap is not None:
                    scores = np.tanh(scores / softcap) * softcap
                if sinks is not None:
                    scores = np.append(scores, float(sinks[n]))
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[i, n] = weights[: position + 1 - oldest] @ values[oldest : position + 1, n // group]
    return out
