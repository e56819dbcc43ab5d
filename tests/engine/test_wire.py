"""What travels between an engine and a front comes back as it was, as far as a front looks at it."""

import numpy as np

from jaxllm import SamplingParams
from jaxllm.config.logits_processor import LogitsProcessor
from jaxllm.engine.limits import EngineLimits
from jaxllm.engine.messages import AbortRequests, AddRequest, EngineCall, EngineReply, EngineStats, RankStats
from jaxllm.engine.scores import RequestScores, TokenScores
from jaxllm.engine.wire import (
    News,
    Ready,
    as_wire,
    decode_to_engine,
    decode_to_front,
    encode,
    news_of,
    plain_limits,
    read_limits,
    read_updates,
)
from jaxllm.scheduler.request import RequestUpdate


def test_what_a_front_asks_arrives_as_it_was():
    params = SamplingParams(
        n=2, seed=2**64 - 1, stop=["."], logit_bias={3: 1.5}, extra_args={"shift": {"by": [1.0, 2.0]}}, bad_words=["x"]
    )
    messages = [
        AddRequest("a", [1, 2], params.replace(bad_word_token_ids=((7, 8),)), 3, "salt", {"0_a": [5]}),
        AbortRequests(("0_a", "1_a")),
        EngineCall(4, "pause", ("drop",)),
    ]
    assert [decode_to_engine(encode(as_wire(message))) for message in messages] == messages


def test_the_tokens_of_a_step_arrive_whatever_kind_of_update_has_them():
    scores = RequestScores((TokenScores((4, 9), (-0.5, -1.5), (1, 2)),), (None, TokenScores((2,), (-3.0,), (7,))))
    updates = [
        RequestUpdate("first", (1,), num_output_tokens=1, num_cached_tokens=16, first_scheduled_time=2.5),
        RequestUpdate("later", (2,), num_output_tokens=2, weight_version="new"),
        RequestUpdate("other version", (3,), num_output_tokens=9, weight_version=0),
        RequestUpdate("scored", (4,), num_output_tokens=3, scores=scores),
        RequestUpdate("stopped", (5,), "stop", 5, num_output_tokens=3),
        RequestUpdate("failed", finish_reason="error", error="no room"),
    ]
    stats = EngineStats(running=3, ranks=(RankStats(running=1), RankStats(running=2)))
    told = news_of(updates, [EngineReply(1, [2], None)], stats)
    assert (told.names, told.tokens, told.weight_version) == (["later"], [2], "new")
    received = decode_to_front(encode(told))
    assert isinstance(received, News)
    assert (received.replies, received.stats) == ([EngineReply(1, [2], None)], stats)
    found = {update.request_id: update for update in read_updates(received)}
    assert found.pop("later") == RequestUpdate("later", (2,), weight_version="new")
    assert found == {update.request_id: update for update in updates if update.request_id != "later"}


def test_a_front_checks_requests_against_the_limits_of_the_engine():
    limits = EngineLimits(
        vocab_size=9,
        max_model_len=4,
        eos_token_ids=(1, 2),
        processors={"shift": LogitsProcessor(function=print, parameters={"by": np.zeros(2, np.float32)})},
    )
    ready = decode_to_front(encode(Ready(0, *plain_limits(limits), {"top_k": 3}, None)))
    assert isinstance(ready, Ready)
    found = read_limits(ready)
    assert (found.vocab_size, found.max_model_len, found.eos_token_ids) == (9, 4, (1, 2))
    found.check([1], SamplingParams(extra_args={"shift": {"by": [1.0, 2.0]}}))
