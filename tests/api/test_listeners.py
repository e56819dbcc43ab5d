"""Updates that wait for a slow reader become one, where nothing is lost by it."""

from jaxllm.api.listeners import join
from jaxllm.engine.scores import RequestScores, TokenScores
from jaxllm.scheduler.request import RequestUpdate


def test_tokens_of_one_sample_are_joined_and_its_end_comes_with_them():
    first = RequestUpdate("a", (1, 2), num_cached_tokens=16, first_scheduled_time=1.5)
    joined = join(first, RequestUpdate("a", (3,), "stop", 3))
    assert joined == RequestUpdate(
        "a", (1, 2, 3), "stop", 3, num_cached_tokens=16, first_scheduled_time=1.5, weight_version=0
    )


def test_scores_stay_with_their_tokens():
    def scored(token: int, prompt: tuple[None, ...] | None = None) -> RequestUpdate:
        return RequestUpdate("a", (token,), scores=RequestScores((TokenScores((token,), (-1.0,), (1,)),), prompt))

    joined = join(scored(1, (None,)), scored(2))
    assert joined is not None
    assert [position.token_ids for position in joined.scores.tokens] == [(1,), (2,)]
    assert joined.scores.prompt == (None,)
    assert join(scored(1), scored(2, (None,))) is None
    assert join(scored(1), RequestUpdate("a", (2,))) is None


def test_what_differs_is_told_apart():
    update = RequestUpdate("a", (1,))
    assert join(update, RequestUpdate("b", (2,))) is None
    assert join(update, RequestUpdate("a", (2,), weight_version=1)) is None
    assert join(update, RequestUpdate("a", finish_reason="error", error="no room")) is None
    assert join(RequestUpdate("a", (1,), "stop"), RequestUpdate("a", (2,))) is None
    assert join(update, RuntimeError("gone")) is None
