from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.buckets import SIZES, VARIANTS, Buckets, StepShape, make_buckets

limits = st.builds(
    make_buckets,
    max_num_seqs=st.integers(1, 600),
    max_num_batched_tokens=st.integers(1, 9000),
    max_blocks=st.integers(1, 20_000),
    coarse=st.booleans(),
)


def assert_holds(buckets: Buckets, tokens: int, requests: int, width: int, variant) -> StepShape:
    shape = buckets.shape(tokens, requests, width, variant)
    assert shape.num_tokens >= tokens
    assert shape.num_requests >= requests
    assert shape.table_width >= width
    assert shape.variant == variant
    assert (shape.num_tokens == shape.num_requests) == (tokens == requests)
    assert shape.program == ("decode" if tokens == requests else "mixed")
    return shape


@settings(max_examples=300, deadline=None, derandomize=True)
@given(buckets=limits, data=st.data())
def test_every_step_within_the_limits_fits_a_planned_shape(buckets, data):
    tokens = data.draw(st.integers(1, buckets.mixed_tokens[-1]), label="tokens")
    requests = data.draw(st.integers(1, min(tokens, buckets.decode[-1])), label="requests")
    width = data.draw(st.integers(1, buckets.table_widths[-1]), label="width")
    variant = data.draw(st.sampled_from(VARIANTS), label="variant")
    assert assert_holds(buckets, tokens, requests, width, variant) in buckets.plan()


def test_small_limits_are_covered_to_the_last_step():
    # Among them budgets below the number of requests, and a single token.
    for seqs, budget, coarse in [
        (1, 1, True),
        (8, 4, True),
        (8, 4, False),
        (33, 20, True),
        (5, 40, False),
        (3, 3, True),
    ]:
        buckets = make_buckets(seqs, budget, 7, coarse)
        plan = set(buckets.plan(("greedy",)))
        for tokens in range(1, budget + 1):
            for requests in range(1, min(tokens, seqs) + 1):
                assert assert_holds(buckets, tokens, requests, 7, "greedy") in plan


@settings(max_examples=50, deadline=None, derandomize=True)
@given(buckets=limits)
def test_the_plan_is_a_short_list_without_repeats_small_shapes_first(buckets):
    plan = buckets.plan()
    assert len(plan) == len(set(plan))
    assert [shape.num_tokens for shape in plan] == sorted(shape.num_tokens for shape in plan)
    assert {shape.variant for shape in plan} == set(VARIANTS)
    assert len(plan) <= 3 * len(buckets.table_widths) * (len(SIZES) + len(SIZES) ** 2 // 4)
    # Decode shapes and mixed ones never have the same key: T == B is what tells them apart.
    assert all(shape.num_requests <= shape.num_tokens for shape in plan)
    assert set(buckets.covering()) <= set(plan)
    assert all(any(cover.holds(shape) for cover in buckets.covering()) for shape in plan)


def test_a_shape_is_the_smallest_that_holds_the_step():
    buckets = make_buckets(64, 512, 2000, coarse=False)
    assert buckets.shape(5, 5, 3, "greedy") == StepShape(8, 8, 1024, "greedy")
    assert buckets.shape(64, 64, 1025, "logits") == StepShape(64, 64, 2000, "logits")
    assert buckets.shape(35, 35, 3, "greedy") == StepShape(48, 48, 1024, "greedy")
    assert buckets.shape(20, 3, 1, "logits") == StepShape(32, 16, 1024, "logits")
    assert buckets.shape(33, 3, 1, "logits") == StepShape(128, 16, 1024, "logits")
    # 20 tokens of 17 requests: the requests are padded to 64, so the tokens go beyond them.
    assert buckets.shape(20, 17, 1, "logits") == StepShape(128, 64, 1024, "logits")


def test_sizes_worth_filling_are_compiled_for_the_largest_batch_and_beyond_what_weights_cost():
    buckets = make_buckets(64, 512, 2000, coarse=False)
    assert buckets.fillable == (256, 384, 512)
    for size in buckets.fillable:
        assert buckets.shape(size, 64, 1, "greedy").num_tokens == size
    assert make_buckets(300, 2048, 2000, coarse=False).fillable == (384, 512, 768, 1024, 2048)
    assert make_buckets(64, 512, 2000, coarse=True).fillable == ()


def test_the_plan_may_leave_variants_out():
    buckets = make_buckets(4, 64, 10, coarse=True)
    assert {shape.variant for shape in buckets.plan(("greedy",))} == {"greedy"}
    assert 2 * len(buckets.plan(("greedy",))) == len(buckets.plan())


def test_a_shape_reads_as_a_line():
    assert str(StepShape(8, 8, 4, "greedy")) == "decode T=8 B=8 M=4 greedy"
    assert str(StepShape(32, 8, 4, "logits")) == "mixed T=32 B=8 M=4 logits"
