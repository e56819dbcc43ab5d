import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.kernels.paged_attention.work_list import list_chunks, list_tiles

B, T, UNIT, MIN_CHUNK, NUM_EXTRA, TILE = 6, 50, 16, 32, 9, 4
compiled_chunks = jax.jit(
    list_chunks, static_argnames=("max_new", "all_rows", "unit", "min_chunk", "num_extra"), inline=True
)
compiled_tiles = jax.jit(list_tiles, static_argnums=3, static_argnames=("min_new", "tile", "align"))


def draw_batch(data):
    new = [data.draw(st.integers(0, 8), label="new") for _ in range(B)]
    context = [n and n + data.draw(st.sampled_from([0, 1, 15, 16, 100, 3000]), label="before") for n in new]
    return np.concatenate([[0], np.cumsum(new)]).astype(np.int32), np.asarray(context, np.int32)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_chunks_cover_each_key_that_a_taken_request_sees_once(data):
    query_start, context_len = draw_batch(data)
    new = np.diff(query_start)
    all_rows = data.draw(st.booleans(), label="all rows")
    if all_rows:
        query_start, new = np.arange(B + 1, dtype=np.int32), np.ones(B, int)
    window = data.draw(st.sampled_from([1, 20, 1 << 30]), label="window")
    chunks = compiled_chunks(
        query_start,
        context_len,
        jnp.int32(window),
        max_new=2,
        all_rows=all_rows,
        unit=UNIT,
        min_chunk=MIN_CHUNK,
        num_extra=NUM_EXTRA,
    )
    assert chunks.chunk.shape == (B + NUM_EXTRA, 4)
    rows = np.asarray(chunks.chunk)
    used = rows[rows[:, 0] >= 0]
    assert (rows[len(used) :, 0] == -1).all(), "unused rows come last"
    longest = [max(-(-(end - begin) // UNIT) for _, begin, end, _ in used[used[:, 0] == b]) for b in used[:, 0]]
    assert longest == sorted(longest, reverse=True)
    for b in range(B):
        own = used[used[:, 0] == b]
        assert len(own) == chunks.num_chunks[b]
        if not (all_rows or 1 <= new[b] <= 2):
            assert len(own) == 0
            continue
        assert (used[chunks.first_chunk[b] :][: len(own), 0] == b).all()
        oldest = max(0, context_len[b] - new[b] + 1 - window)
        begins, ends = own[:, 1], own[:, 2]
        assert begins[0] == oldest // UNIT * UNIT or context_len[b] == 0
        assert ends[-1] == context_len[b]
        assert (begins[1:] == ends[:-1]).all()
        assert (begins % UNIT == 0).all() or context_len[b] == 0
        assert (own[:, 3] == (len(own) > 1)).all()


def test_a_lone_long_context_is_split_for_the_whole_card_and_short_ones_stay_whole():
    lengths = jnp.array([60_000] + [256] * 5, jnp.int32)
    chunks = list_chunks(
        jnp.arange(7, dtype=jnp.int32), lengths, None, max_new=1, all_rows=True, unit=64, min_chunk=128, num_extra=256
    )
    assert chunks.num_chunks[0] > 200
    assert (np.asarray(chunks.num_chunks[1:]) <= 2).all()
    spans = np.asarray(chunks.chunk[:, 2] - chunks.chunk[:, 1])
    assert spans.max() <= 256


def test_no_request_is_split_without_room_for_more_chunks():
    lengths = jnp.array([60_000, 3, 0], jnp.int32)
    chunks = list_chunks(
        jnp.arange(4, dtype=jnp.int32), lengths, None, max_new=1, all_rows=True, unit=64, min_chunk=128, num_extra=0
    )
    assert np.asarray(chunks.chunk).tolist() == [[0, 0, 60_000, 0], [1, 0, 3, 0], [2, 0, 0, 0]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_tiles_cover_each_token_of_long_rows_and_of_the_padding_once(data):
    query_start, context_len = draw_batch(data)
    new = np.diff(query_start)
    window = data.draw(st.sampled_from([1, 20, 1 << 30]), label="window")
    align = data.draw(st.sampled_from([1, 4]), label="align")
    tiles = compiled_tiles(query_start, context_len, jnp.int32(window), T, min_new=3, tile=TILE, align=align)
    rows = np.asarray(tiles.tile)
    used = rows[rows[:, 0] >= 0]
    assert tiles.num_tiles.tolist() == [len(used)]
    assert (rows[len(used) :, 0] == -1).all(), "unused rows come last"
    seen = np.zeros(T, int)
    keys = []
    for b, first, count, position in used:
        assert 1 <= count <= TILE - first % align
        assert first % align == 0 or first == query_start[b] or first == query_start[-1]
        seen[first : first + count] += 1
        keys.append(max(0, min(position + count, window + TILE)))
        if first >= query_start[-1]:
            assert position + count <= 0, "the padding sees nothing"
        else:
            assert query_start[b] <= first
            assert first + count <= query_start[b + 1]
            assert position == context_len[b] - new[b] + first - query_start[b]
    taken = np.ones(T, int)
    for b in range(B):
        if new[b] < 3:
            taken[query_start[b] : query_start[b + 1]] = 0
    np.testing.assert_array_equal(seen, taken)
    assert keys == sorted(keys, reverse=True)
