"""The engine's loop with a stand-in for the device: order of work, failures, and a step that hangs."""

import logging
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxllm import RequestOutputKind, SamplingParams
from jaxllm.config.errors import InputError
from jaxllm.engine import engine as engine_module
from jaxllm.engine.buckets import StepShape, make_buckets
from jaxllm.engine.engine import Engine
from jaxllm.engine.input_builder import InputBuilder, PackedStep
from jaxllm.engine.limits import EngineLimits
from jaxllm.engine.loop import read_stats
from jaxllm.engine.step_inputs import host_views
from jaxllm.engine.watchdog import Watchdog
from jaxllm.mesh.adopt import Adopted
from jaxllm.models.given import Params
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.pace import Pace
from jaxllm.scheduler.scheduler import Scheduler, SchedulerConfig

ROWS, BLOCK, VOCAB, MAX_LEN = 4, 4, 1000, 64


class Answer:
    def __init__(self, runner: "EchoRunner", tokens: list[list[int]], step: int):
        self._runner, self._tokens, self._step = runner, tokens, step

    def read(self) -> list[list[int]]:
        self._runner.log.append(("read", self._step))
        time.sleep(self._runner.delay)
        if self._step in self._runner.fail_reads:
            raise RuntimeError("the device fell over\nsecond line")
        return self._tokens

    def read_scores(self) -> None:
        return None


class EchoRunner:
    """Stands in for the model: the next token is the last one plus one. Keeps row state as a device would."""

    def __init__(self, num_ranks: int = 1):
        self.num_ranks = num_ranks
        self.log: list[tuple[str, int]] = []
        self.steps = 0
        self.resets = 0
        self.delay = 0.0
        self.fail_launches: set[int] = set()
        self.fail_reads: set[int] = set()
        self.idle_parts = 0
        self.last = [[0] * (ROWS + 1) for _ in range(num_ranks)]

    def execute(self, step: PackedStep) -> Answer:
        self.steps += 1
        if self.steps in self.fail_launches:
            raise ValueError("no such program")
        self.log.append(("launch", self.steps))
        assert step.packed.shape[0] == self.num_ranks
        return Answer(self, [self._run_rank(*each, step.shape) for each in enumerate(step.packed)], self.steps)

    def _run_rank(self, rank: int, packed: np.ndarray, shape: StepShape) -> list[int]:
        inputs, last, tokens = host_views(packed, shape, 1), self.last[rank], []
        self.idle_parts += not inputs.context_len.any()
        for b in range(shape.num_requests):
            token = inputs.token[max(inputs.query_start[b + 1] - 1, 0)]
            token = last[inputs.row[b]] if token < 0 else int(token)
            tokens.append((token + 1) % VOCAB)
            if inputs.samples[b]:
                last[inputs.row[b]] = tokens[-1]
        return tokens

    @property
    def weights(self) -> dict:
        return {}

    def take_weights(self, params: Params, casts: bool = True) -> Adopted:
        return Adopted(params)

    def set_weights(self, weights: dict) -> None:
        self.log.append(("weights", self.steps))

    def reset(self) -> None:
        self.resets += 1
        self.last = [[-500] * (ROWS + 1) for _ in range(self.num_ranks)]


def make_engine(
    runner: EchoRunner,
    num_blocks: int = 65,
    timeout: float = 60.0,
    eos: tuple[int, ...] = (),
    target_seconds: float | None = None,
) -> Engine:
    buckets = make_buckets(ROWS, 16, MAX_LEN // BLOCK, coarse=True)
    pace = None if target_seconds is None else Pace(target_seconds, buckets.mixed_sizes, buckets.decode_size)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=16, max_model_len=MAX_LEN),
        [BlockPool(num_blocks, BLOCK) for _ in range(runner.num_ranks)],
        KVGroups(),
        pace,
    )
    limits = EngineLimits(vocab_size=VOCAB, max_model_len=MAX_LEN, eos_token_ids=eos)
    builder = InputBuilder(buckets, ROWS, MAX_LEN // BLOCK, 1, vocab_size=VOCAB, num_ranks=runner.num_ranks)
    return Engine(scheduler, builder, runner, limits, Watchdog(timeout), pace)


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def run(engine: Engine):
    tokens: dict[str, list[int]] = {}
    ends: dict[str, tuple[str, str | None]] = {}
    while engine.has_work:
        for update in engine.step():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            if update.finish_reason:
                assert update.request_id not in ends
                ends[update.request_id] = (update.finish_reason, update.error)
        engine.scheduler.check()
    assert engine.scheduler.stats.kv_usage == 0.0
    return tokens, ends


def count_up(start: int, count: int) -> list[int]:
    return [(start + i) % VOCAB for i in range(count)]


def test_each_step_is_launched_before_the_tokens_of_the_one_before_are_read():
    runner = EchoRunner()
    engine = make_engine(runner)
    engine.add("a", [1, 2, 3], greedy(4))
    tokens, ends = run(engine)
    assert tokens == {"a": [4, 5, 6, 7]}
    assert ends == {"a": ("length", None)}
    assert runner.log == [
        ("launch", 1),
        ("launch", 2),
        ("read", 1),
        ("launch", 3),
        ("read", 2),
        ("launch", 4),
        ("read", 3),
        ("read", 4),
    ]


def test_who_wants_the_end_only_is_told_the_first_token_and_then_the_rest():
    engine, seen = make_engine(EchoRunner()), []
    final = RequestOutputKind.FINAL_ONLY
    engine.add("quiet", [1, 2, 3], greedy(8, output_kind=final))
    engine.add("loud", [11, 12], greedy(8))
    engine.add("stopped by text", [21, 22], greedy(8, output_kind=final, stop=["x"]))
    engine.add("scored", [31, 32], greedy(8, output_kind=final, logprobs=1))
    while engine.has_work:
        seen += [(update.request_id, update.token_ids, update.num_counted) for update in engine.step()]
    quiet = [told[1:] for told in seen if told[0] == "quiet"]
    assert [tokens for tokens, _ in quiet] == [(4,), (5,), (6, 7, 8, 9, 10, 11)]
    assert engine.num_quiet_tokens == sum(num_counted for _, num_counted in quiet) == 6
    for name, start in (("loud", 13), ("stopped by text", 23), ("scored", 33)):
        assert [told[1] for told in seen if told[0] == name] == [(token,) for token in count_up(start, 8)]


def test_tokens_kept_back_are_told_before_the_version_of_the_weights_changes_and_at_an_abort():
    engine = make_engine(EchoRunner())
    engine.add("a", [1, 2, 3], greedy(20, output_kind=RequestOutputKind.FINAL_ONLY))
    seen = [told for _ in range(6) for told in engine.step()]
    engine.update_weight_version("second")
    seen += [told for _ in range(3) for told in engine.step()]
    last = engine.abort("a")
    assert last is not None
    seen.append(last)
    tokens = [(token, told.weight_version) for told in seen for token in told.token_ids]
    assert [token for token, _ in tokens] == count_up(4, 8)
    assert [version for _, version in tokens] == [0] * 5 + ["second"] * 3
    run(engine)


def test_padding_is_counted():
    engine = make_engine(EchoRunner())
    engine.add("a", [1, 2, 3], greedy(3))
    run(engine)
    assert engine.times.num_steps == 3  # of 16, 1 and 1 tokens
    assert engine.times.num_padded_tokens == 13


def test_a_stop_found_late_costs_one_discarded_token():
    engine = make_engine(EchoRunner(), eos=(6,))
    engine.add("a", [1, 2, 3], greedy(30))
    engine.add("b", [1, 2, 3], greedy(5, ignore_eos=True))
    tokens, ends = run(engine)
    assert tokens == {"a": [4, 5, 6], "b": [4, 5, 6, 7, 8]}
    assert ends["a"][0] == "stop"
    assert engine.scheduler.stats.num_discarded_tokens == 1


@pytest.mark.parametrize("where", ["launch", "read"])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_step_that_raises_fails_only_its_requests_with_the_cause(where, step, caplog):
    runner = EchoRunner()
    (runner.fail_launches if where == "launch" else runner.fail_reads).add(step)
    engine = make_engine(runner)
    for i in range(7):  # four rows: three wait, and are in no step that fails
        engine.add(f"r{i}", count_up(10 * i, 3 + i), greedy(6))
    with caplog.at_level(logging.ERROR):
        tokens, ends = run(engine)
    failed = {name for name, (reason, _) in ends.items() if reason == "error"}
    assert failed
    assert failed <= {"r0", "r1", "r2", "r3"}
    assert runner.resets == 1
    cause = "no such program" if where == "launch" else "the device fell over"
    for name in failed:
        error = ends[name][1] or ""
        assert cause in error
        assert "\n" not in error
    for i in range(7):
        if f"r{i}" not in failed:
            assert tokens[f"r{i}"] == count_up(10 * i + 3 + i, 6)
            assert ends[f"r{i}"] == ("length", None)


def test_requests_outside_a_failed_step_are_computed_again_and_lose_nothing():
    runner = EchoRunner()
    engine = make_engine(runner)
    engine.add("long", count_up(100, 40), greedy(8))  # fills the budget of 16 a step for three steps
    engine.add("next", count_up(500, 2), greedy(8))
    runner.fail_reads.add(1)
    tokens, ends = run(engine)
    assert ends["long"][0] == "error"
    assert tokens["next"] == count_up(502, 8)


def test_a_step_that_hangs_is_named_while_it_hangs(caplog):
    runner = EchoRunner()
    runner.delay = 0.4
    engine = make_engine(runner, timeout=0.1)
    engine.add("slow-one", [1, 2, 3], greedy(1))
    with caplog.at_level(logging.WARNING):
        tokens, _ = run(engine)
    assert tokens == {"slow-one": [4]}
    assert "hanging: step 1 (mixed T=" in caplog.text
    assert "slow-one" in caplog.text
    assert "step_timeout 0.1 s" in caplog.text
    assert engine.hanging is None
    engine.close()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1, VOCAB], "token id 1000 at position 1 is outside the vocabulary of 1,000"),
        ([-1], "token id -1 at position 0"),
        ([1] * MAX_LEN, "the prompt has 64 tokens, but max_model_len 64 leaves room for 63"),
    ],
)
def test_a_prompt_the_model_cannot_take_is_refused_in_one_line(prompt, message):
    engine = make_engine(EchoRunner())
    with pytest.raises(InputError, match=message) as caught:
        engine.add("a", prompt, greedy(1))
    assert "\n" not in str(caught.value)
    assert not engine.has_work


def test_a_request_that_could_never_fit_the_pool_is_refused_with_the_numbers():
    engine = make_engine(EchoRunner(), num_blocks=5)
    with pytest.raises(ValueError, match=r"6 KV blocks \(3 prompt \+ 20 output tokens, 4 a block.*the cache has 4"):
        engine.add("a", [1, 2, 3], greedy(20))


def test_stop_token_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(InputError, match="stop_token_ids: token id 1001"):
        make_engine(EchoRunner()).add("a", [1], greedy(1, stop_token_ids=[1001]))


def test_a_full_cache_preempts_and_every_request_still_gets_its_tokens():
    engine = make_engine(EchoRunner(), num_blocks=17)
    for i in range(6):
        engine.add(f"r{i}", count_up(100 * i, 5), greedy(20))
    tokens, _ = run(engine)
    assert engine.scheduler.stats.num_preemptions > 0
    assert tokens == {f"r{i}": count_up(100 * i + 5, 20) for i in range(6)}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_data_ranks_give_the_tokens_of_one_whether_they_are_busy_preempt_or_idle(num_ranks):
    runner = EchoRunner(num_ranks)
    engine = make_engine(runner, num_blocks=17)
    engine.add("first", [7], greedy(3))
    tokens, ends = run(engine)  # the other ranks have nothing to do
    assert runner.idle_parts > 0
    for i in range(14):
        engine.add(f"r{i}", count_up(100 * i, 1 + 5 * (i % 4)), greedy(6 + 4 * (i % 5)))
    more, more_ends = run(engine)
    assert tokens | more == {"first": [8, 9, 10]} | {
        f"r{i}": count_up(100 * i + 1 + 5 * (i % 4), 6 + 4 * (i % 5)) for i in range(14)
    }
    assert {reason for reason, _ in (ends | more_ends).values()} == {"length"}
    assert engine.scheduler.stats.num_preemptions > 0
    stats = read_stats(engine)
    assert len(stats.ranks) == num_ranks
    assert all(rank.num_step_tokens > 0 for rank in stats.ranks)
    assert sum(rank.num_padded_tokens for rank in stats.ranks) == stats.num_padded_tokens
    assert sum(rank.num_step_tokens for rank in stats.ranks) == stats.num_scheduled_tokens
    engine.close()


def test_a_step_that_raises_fails_its_requests_on_all_ranks_and_no_others():
    runner = EchoRunner(2)
    runner.fail_reads.add(3)
    engine = make_engine(runner)
    for i in range(12):  # four rows a rank: four wait
        engine.add(f"r{i}", count_up(50 * i, 3), greedy(6))
    tokens, ends = run(engine)
    assert {name for name, (reason, _) in ends.items() if reason == "error"} == {f"r{i}" for i in range(8)}
    assert {name: tokens[name] for name in ("r8", "r9", "r10", "r11")} == {
        f"r{i}": count_up(50 * i + 3, 6) for i in range(8, 12)
    }
    engine.close()


def test_a_pace_is_told_what_steps_take_that_follow_each_other(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(engine_module.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(Answer, "read", lambda answer: setattr(clock, "now", clock.now + 0.02) or answer._tokens)
    engine = make_engine(EchoRunner(), target_seconds=1.0)
    engine.add("a", [1, 2, 3], greedy(10))
    tokens, _ = run(engine)
    clock.now += 100.0  # nothing runs meanwhile
    engine.add("b", [5, 6, 7], greedy(10))
    tokens |= run(engine)[0]
    engine.close()
    assert tokens == {"a": count_up(4, 10), "b": count_up(8, 10)}
    pace = engine._pace
    assert pace is not None
    assert pace.time.num_observed == 18  # all but the first of each
    assert pace.time.predict(1, True, 10) == pytest.approx(0.02)


def test_new_weights_come_between_two_steps_and_are_counted():
    runner = EchoRunner()
    engine = make_engine(runner)
    engine.add("a", [1, 2, 3], greedy(9))
    seen = [[*engine.step()] for _ in range(3)]
    seen.append(engine.update_params({}, "keep"))
    assert runner.log[-2:] == [("read", 3), ("weights", 3)]
    versions = [update.weight_version for updates in seen for update in updates]
    for version in (None, "best", None, 20, None):
        engine.update_params({}, "recompute", version)
        versions.append(engine.weight_version)
    engine.update_weight_version("named")
    rest = [(update.token_ids, update.weight_version) for update in engine.step() + engine.step()]
    assert versions == [0, 0, 0, 2, "best", 4, 20, 21]
    assert rest == [((7,), "named")]


def test_weights_that_are_refused_end_nothing_and_lose_no_token():
    runner = EchoRunner()
    engine = make_engine(runner)
    engine.add("a", [1, 2, 3], greedy(4))
    engine.step()

    def refuse(params: Params, casts: bool = True) -> Adopted:
        raise InputError("weights: head.proj is missing")

    runner.take_weights = refuse
    mistakes: list[tuple[Any, str]] = [
        (({}, "drop"), "head.proj is missing"),
        (({}, "stop"), "kv must be one of keep, drop, recompute, got 'stop'"),
        (({}, "drop", 1.5), r"version must be a whole number or a text, got 1\.5"),
        (({}, "drop", True), "version must be a whole number or a text, got True"),
    ]
    for arguments, message in mistakes:
        with pytest.raises(InputError, match=message):
            engine.update_params(*arguments)
    assert not engine.is_paused
    assert (engine.weight_version, run(engine)[0]) == (0, {"a": [4, 5, 6, 7]})


def test_a_pause_outlasts_new_weights_and_drop_tells_what_ended():
    engine = make_engine(EchoRunner())
    for name in "abcde":
        engine.add(name, [1, 2, 3], greedy(9))
    first = engine.step() + engine.step()
    engine.pause()
    updates = engine.update_params({}, "drop")
    assert engine.is_paused
    assert {(update.request_id, update.finish_reason) for update in updates} == {(name, "abort") for name in "abcd"}
    engine.resume()
    tokens, ends = run(engine)
    assert (tokens, ends) == ({"e": count_up(4, 9)}, {"e": ("length", None)})
    assert {update.weight_version for update in first + updates} == {0}  # what they have is of the old ones


def test_requests_that_another_engine_began_go_on_behind_their_tokens():
    engine = make_engine(EchoRunner())
    engine.add("a", [1, 2, 3], greedy(8), outputs={"a": [4, 5, 6]})
    engine.add("b", [10, 20], SamplingParams(max_tokens=4, n=3, seed=1), outputs={"0_b": [21], "2_b": []})
    engine.add("c", [30], greedy(2))
    tokens, ends = run(engine)
    assert tokens == {
        "a": count_up(7, 5),
        "0_b": count_up(22, 3),
        "2_b": count_up(21, 4),
        "c": count_up(31, 2),
    }
    assert set(ends.values()) == {("length", None)}


def test_a_request_that_had_all_its_tokens_is_not_begun_again():
    engine = make_engine(EchoRunner())
    with pytest.raises(ValueError, match="has 2 output tokens, as many as it may have"):
        engine.add("a", [1, 2, 3], greedy(2), outputs={"a": [4, 5]})
    assert not engine.has_work


def test_a_prompt_whose_scores_were_told_is_not_scored_again_by_another_engine():
    engine = make_engine(EchoRunner())
    engine.add("a", [1, 2, 3], greedy(3, prompt_logprobs=0), outputs={"a": [4]})
    (request,) = engine.scheduler.living.values()
    assert isinstance(request.params, SamplingParams)
    assert request.params.prompt_logprobs is None
    assert run(engine)[0] == {"a": [5, 6]}
