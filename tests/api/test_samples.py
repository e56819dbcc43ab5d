"""Several samples, the kinds of output, and log-probabilities, through LLM and AsyncLLM over a scripted engine."""

import asyncio
import time
from typing import Any

import pytest

from jaxllm import RequestOutputKind, SamplingParams
from jaxllm.api.errors import RequestError
from jaxllm.config.errors import InputError


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def letters(prompt: list[int], index: int) -> list[int]:
    """Sample i of a prompt: i letters more than three, from its last token on."""
    return [prompt[-1] + 1 + place for place in range(3 + index)]


async def outputs_of(llm: Any, params: SamplingParams, **options: Any) -> list[Any]:
    return [output async for output in llm.generate("xa", params, **options)]


def test_n_samples_are_outputs_in_order_and_the_last_output_is_finished(scripted):
    llm, _ = scripted(letters)
    outputs = run(outputs_of(llm, SamplingParams(n=3)))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    last = outputs[-1]
    assert [each.index for each in last.outputs] == [0, 1, 2]
    assert [each.text for each in last.outputs] == ["bcd", "bcde", "bcdef"]
    assert all(len(output.outputs) == 3 for output in outputs)
    assert last.num_cached_tokens == 3


def test_cumulative_delta_and_final_outputs_tell_the_same(scripted):
    llm, _ = scripted(letters)

    def params(kind: RequestOutputKind, flat: bool) -> SamplingParams:
        return SamplingParams(n=2, logprobs=2, prompt_logprobs=1, output_kind=kind, flat_logprobs=flat)

    for flat in (False, True):
        cumulative = run(outputs_of(llm, params(RequestOutputKind.CUMULATIVE, flat)))
        deltas = run(outputs_of(llm, params(RequestOutputKind.DELTA, flat)))
        (final,) = run(outputs_of(llm, params(RequestOutputKind.FINAL_ONLY, flat)))
        assert cumulative[-1].outputs == final.outputs
        assert cumulative[-1].prompt_logprobs == final.prompt_logprobs
        assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert deltas[0].prompt_logprobs == final.prompt_logprobs
        assert all(delta.prompt_logprobs is None for delta in deltas[1:])
        for whole in final.outputs:
            mine = [delta.outputs[0] for delta in deltas if delta.outputs[0].index == whole.index]
            assert "".join(each.text for each in mine) == whole.text
            assert [token for each in mine for token in each.token_ids] == whole.token_ids
            assert [position for each in mine for position in each.logprobs] == list(whole.logprobs)
            assert mine[-1].cumulative_logprob == whole.cumulative_logprob
            assert (mine[-1].finish_reason, mine[0].finish_reason) == ("length", None)


def test_log_probabilities_have_the_token_itself_the_best_and_those_named(scripted_llm):
    llm, _ = scripted_llm(letters)
    params = SamplingParams(logprobs=2, logprob_token_ids=[200, 1], prompt_logprobs=0)
    (output,) = llm.generate("xa", params, use_tqdm=False)
    (completion,) = output.outputs
    first = completion.logprobs[0]
    assert list(first) == [98, 0, 1, 200]
    assert [entry.rank for entry in first.values()] == [99, 1, 2, None]
    assert first[98].decoded_token == "b"
    assert completion.cumulative_logprob == pytest.approx(
        sum(position[token].logprob for position, token in zip(completion.logprobs, completion.token_ids, strict=True))
    )
    assert output.prompt_logprobs[0] is None
    assert list(output.prompt_logprobs[1]) == [97]


def test_logprobs_of_the_whole_vocabulary_are_all_there(scripted_llm):
    llm, _ = scripted_llm(letters)
    (output,) = llm.generate("xa", SamplingParams(logprobs=-1, flat_logprobs=True), use_tqdm=False)
    assert all(len(position) == 256 for position in output.outputs[0].logprobs)


def test_a_stop_string_ends_one_sample_and_the_engine_is_told_once(scripted, scripted_llm):
    def script(prompt: list[int], index: int) -> list[int]:
        return list(b"ab!" * 300) if index == 1 else list(b"abcabc")

    params = SamplingParams(n=2, stop="!", max_tokens=900)
    llm, engine = scripted(script)
    step = engine.step
    engine.step = lambda: (time.sleep(0.002), step())[1]  # as a real one, it does not run ahead of its readers
    last = run(outputs_of(llm, params))[-1]
    llm.shutdown()
    sync, sync_engine = scripted_llm(script)
    (output,) = sync.generate("xa", params, use_tqdm=False)
    for found, told in ((last, engine), (output, sync_engine)):
        assert [each.text for each in found.outputs] == ["abcabc", "ab"]
        assert [each.finish_reason for each in found.outputs] == ["length", "stop"]
        assert [len(each.token_ids) for each in found.outputs] == [6, 3]
        assert len(told.aborted) == 1
        assert told.aborted[0].startswith("1_")


def test_aborting_a_request_ends_all_its_samples(scripted):
    llm, engine = scripted(lambda prompt, index: list(range(1, 200)) * 5)
    step = engine.step
    engine.step = lambda: time.sleep(0.002) or step()  # so that 900 tokens do not come before the abort does

    async def abort_early() -> Any:
        output = None
        async for output in llm.generate("xa", SamplingParams(n=3, max_tokens=900), request_id="mine"):
            if output.outputs[2].token_ids:
                await llm.abort("mine")
        return output

    last = run(abort_early())
    assert [each.finish_reason for each in last.outputs] == ["abort"] * 3
    assert sorted(set(engine.aborted)) == ["0_mine", "1_mine", "2_mine"]
    assert engine._living == {}


def test_leaving_the_iteration_aborts_every_sample(scripted):
    llm, engine = scripted(lambda prompt, index: list(range(1, 200)) * 5)

    async def leave() -> None:
        async for _ in llm.stream("xa", SamplingParams(n=2, max_tokens=900)):
            break
        while engine._living:
            await asyncio.sleep(0.01)

    run(leave())
    assert len(llm._listeners) == 0


def test_an_error_of_one_sample_loses_the_request(scripted, scripted_llm):
    llm, engine = scripted(letters)
    engine.failure = "step 1 failed"
    with pytest.raises(RequestError, match="step 1 failed"):
        run(outputs_of(llm, SamplingParams(n=2)))
    sync, engine = scripted_llm(letters)
    engine.failure = "step 1 failed"
    with pytest.raises(RequestError, match="step 1 failed"):
        sync.generate(["xa", "xb"], SamplingParams(n=2), use_tqdm=False)
    assert [output.finished for output in sync.generate(["xa", "xb"], use_tqdm=False)] == [True, True]


def test_enqueued_requests_are_collected_in_order_and_other_calls_go_on_meanwhile(scripted_llm):
    llm, _ = scripted_llm(letters)
    ids = llm.enqueue(["xa", "xk"], SamplingParams(n=2))
    ids += llm.enqueue_chat([{"role": "user", "content": "xq"}], chat_template_kwargs={"suffix": "r"})
    assert len(set(ids)) == 3
    assert [output.outputs[0].text for output in llm.generate("xc", use_tqdm=False)] == ["def"]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [[each.text for each in output.outputs] for output in outputs] == [["bcd", "bcde"], ["lmn", "lmno"], ["stu"]]
    assert llm.wait_for_completion() == []


def test_when_a_step_fails_whoever_waits_for_its_requests_is_told(scripted_llm):
    llm, engine = scripted_llm(letters)
    llm.enqueue("xa")
    engine.failure = "step 1 failed"
    with pytest.raises(RequestError, match="step 1 failed"):
        llm.generate("xc", use_tqdm=False)
    with pytest.raises(RequestError, match="step 1 failed"):
        llm.wait_for_completion()
    assert llm.generate("xc", use_tqdm=False)[0].finished


def test_the_bar_tells_both_speeds_and_may_be_the_callers_own(scripted_llm):
    llm, _ = scripted_llm(letters)
    told: list[str] = []

    class Bar:
        def __init__(self, total: int, desc: str):
            told.append(f"{desc} {total}")

        def set_postfix_str(self, text: str) -> None:
            told.append(text)

        def update(self, count: int) -> None:
            told.append(f"+{count}")

        def close(self) -> None:
            told.append("close")

    llm.generate(["xa", "xb"], SamplingParams(n=2), use_tqdm=Bar)
    assert told[0] == "generating 2"
    assert told.count("+1") == 2
    assert told[-1] == "close"
    speeds = [line for line in told if "toks/s" in line]
    assert len(speeds) == 2
    assert all(line.startswith("est. speed input: ") and ", output: " in line for line in speeds)


def test_priorities_and_adapters_are_checked(scripted_llm):
    llm, _ = scripted_llm(letters)
    assert len(llm.generate(["xa", "xb"], use_tqdm=False, priority=3)) == 2
    with pytest.raises(InputError, match="2 prompts and 1 priorities"):
        llm.generate(["xa", "xb"], priority=[1])
    with pytest.raises(InputError, match="lora_request='adapter' is not supported yet"):
        llm.generate("xa", lora_request="adapter")


def test_a_chat_shows_its_tools_to_the_template_and_takes_another_template(scripted_llm):
    llm, _ = scripted_llm(letters)
    messages = [{"role": "user", "content": "xq"}]
    (output,) = llm.chat(messages, tools=[{"name": "clock"}], use_tqdm=False, suffix="!")
    assert output.prompt == "[clock]xq!"
    (output,) = llm.chat(messages, chat_template="{{ messages[0].content }}?", use_tqdm=False)
    assert output.prompt == "xq?"
    continued = [*messages, {"role": "assistant", "content": "yes, I"}]
    (output,) = llm.chat(continued, add_generation_prompt=False, continue_final_message=True, use_tqdm=False)
    assert output.prompt == "xqyes, I"
    assert output.outputs[0].text == "JKL"
    both = llm.chat([messages, continued], [SamplingParams(n=2), SamplingParams(max_tokens=1)], use_tqdm=False)
    assert [[each.text for each in output.outputs] for output in both] == [["rst", "rstu"], ["J"]]


def test_metrics_are_read_as_objects(scripted_llm, scripted):
    from jaxllm.api.metrics import Counter, Gauge, Histogram

    llm, _ = scripted_llm(letters)
    llm.generate(["xa", "xb"], SamplingParams(n=2), use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics() if "finished_reason" not in metric.labels}
    assert isinstance(metrics["vllm:num_requests_running"], Gauge)
    generated = metrics["vllm:generation_tokens"]
    assert isinstance(generated, Counter)
    assert generated.value == 2 * (3 + 4)
    assert generated.labels == {"model_name": "scripted", "engine": "0"}
    lengths = metrics["vllm:request_generation_tokens"]
    assert isinstance(lengths, Histogram)
    assert (lengths.count, lengths.sum) == (4, 14)
    assert lengths.buckets["2.0"] == 0
    assert lengths.buckets["5.0"] == lengths.buckets["+Inf"] == 4
    ended = [metric for metric in llm.get_metrics() if metric.labels.get("finished_reason") == "length"]
    assert [metric.value for metric in ended] == [4]  # pyright: ignore[reportAttributeAccessIssue]
    llm, _ = scripted(letters)
    run(outputs_of(llm, SamplingParams()))
    assert {metric.name for metric in llm.get_metrics()} == {metric.name for metric in metrics.values()} | {
        "vllm:request_success"
    }
