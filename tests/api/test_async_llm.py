"""AsyncLLM: many callers, cancellation, several event loops, and an engine that dies."""

import asyncio
import threading

import pytest

from jaxllm import AsyncLLM, SamplingParams
from jaxllm.api.errors import EngineDeadError, RequestError
from jaxllm.config.errors import InputError

TIMEOUT = 120


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TIMEOUT))


def prompt(i: int) -> list[int]:
    return [3 + (i * 37 + j * 11) % 300 for j in range(1 + i % 40)]


def greedy(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(golden):
    options = {"num_gpu_blocks_override": 1024, "max_num_seqs": 32, "enforce_eager": True}
    llm = AsyncLLM(str(golden / "llama"), skip_tokenizer_init=True, **options)
    yield llm
    llm.shutdown()


async def tokens_of(llm: AsyncLLM, i: int, params: SamplingParams | None = None) -> list[int]:
    output = None
    async for output in llm.generate(prompt(i), params or greedy()):
        pass
    assert output is not None
    assert output.finished
    return output.outputs[0].token_ids


async def until_empty(llm: AsyncLLM) -> None:
    while llm.stats.running or llm.stats.waiting or llm.stats.kv_usage:
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def alone(llm):
    return [run(tokens_of(llm, i)) for i in range(20)]


def test_many_at_once_get_the_tokens_that_each_gets_alone(llm, alone):
    async def all_at_once():
        return await asyncio.gather(*(tokens_of(llm, i) for i in range(20)))

    assert run(all_at_once()) == alone


def test_generate_yields_the_growing_output_and_stream_the_new_part(llm, alone):
    async def collect():
        lengths = [len(output.outputs[0].token_ids) async for output in llm.generate(prompt(3), greedy())]
        deltas = [delta async for delta in llm.stream(prompt(3), greedy())]
        return lengths, deltas

    lengths, deltas = run(collect())
    assert lengths == list(range(1, 13))
    assert [token for delta in deltas for token in delta.token_ids] == alone[3]
    assert [delta.finish_reason for delta in deltas] == [None] * 11 + ["length"]
    assert deltas[-1].num_output_tokens == 12


def test_leaving_the_iteration_or_cancelling_aborts_and_hurts_no_neighbour(llm, alone):
    async def leave_early(i: int):
        async for _ in llm.stream(prompt(i), greedy(200)):
            return

    async def cancel(i: int):
        task = asyncio.create_task(tokens_of(llm, i, greedy(200)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def mixed():
        results = await asyncio.gather(
            *(leave_early(i) for i in range(8)), *(cancel(i) for i in range(8)), *(tokens_of(llm, i) for i in range(8))
        )
        await until_empty(llm)
        return results[16:]

    assert run(mixed()) == alone[:8]


def test_abort_by_id_ends_the_output_with_abort(llm):
    async def abort_after_two():
        count, last = 0, None
        async for last in llm.generate(prompt(1), greedy(200), request_id="mine"):
            count += 1
            if count == 2:
                await llm.abort("mine")
        await until_empty(llm)
        return last

    last = run(abort_after_two())
    assert last is not None
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert len(last.outputs[0].token_ids) < 200


def test_callers_on_several_event_loops_are_served(llm, alone):
    results: dict[int, list] = {}

    def caller(k: int) -> None:
        async def all_mine():
            return await asyncio.gather(*(tokens_of(llm, i) for i in range(k, 20, 4)))

        results[k] = run(all_mine())

    threads = [threading.Thread(target=caller, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert {k: results[k] for k in range(4)} == {k: alone[k::4] for k in range(4)}


def test_bad_requests_are_refused_before_anything_runs(llm):
    async def bad(prompt_ids, **options):
        async for _ in llm.generate(prompt_ids, greedy(), **options):
            pass

    with pytest.raises(InputError, match="the prompt is empty"):
        run(bad([]))
    with pytest.raises(InputError, match="token id 320 at position 0 is outside the vocabulary of 320"):
        run(bad([320]))
    with pytest.raises(InputError, match="needs a tokenizer"):
        run(bad("text"))

    async def twice():
        first = asyncio.create_task(bad(prompt(2), request_id="same"))
        await asyncio.sleep(0)
        try:
            with pytest.raises(InputError, match="'same' belongs to a request"):
                await bad(prompt(2), request_id="same")
        finally:
            await first

    run(twice())


def test_what_is_frozen_by_a_pause_goes_on_with_the_same_tokens(llm):
    async def paused(clear_cache: bool) -> list[list[int]]:
        tasks = [asyncio.create_task(tokens_of(llm, i, greedy(60))) for i in range(4)]
        while llm.stats.running < 4:
            await asyncio.sleep(0.005)
        await llm.pause_generation(mode="keep", clear_cache=clear_cache)
        assert await llm.is_paused()
        steps = llm.stats.num_steps
        late = asyncio.create_task(tokens_of(llm, 4, greedy(60)))
        await asyncio.sleep(0.1)
        assert llm.stats.num_steps == steps
        assert (llm.stats.kv_usage > 0) is not clear_cache
        await llm.resume_generation()
        return list(await asyncio.gather(*tasks, late))

    undisturbed = [run(tokens_of(llm, i, greedy(60))) for i in range(5)]
    for clear_cache in (False, True):
        assert run(paused(clear_cache)) == undisturbed


def test_a_pause_that_aborts_frees_everything_and_forgets_the_prefixes(llm):
    async def paused() -> list[str]:
        tasks = [asyncio.create_task(end_of(llm, i)) for i in range(4)]
        while llm.stats.running < 4:
            await asyncio.sleep(0.005)
        await llm.pause_generation()
        ends = await asyncio.gather(*tasks)
        assert llm.stats.kv_usage == 0
        assert await llm.reset_prefix_cache()
        await llm.resume_generation()
        return list(ends)

    async def end_of(llm: AsyncLLM, i: int) -> str:
        async for output in llm.generate(prompt(i), greedy(400)):
            if output.finished:
                return output.outputs[0].finish_reason or ""
        return ""

    assert run(paused()) == ["abort"] * 4


def test_a_failed_step_reaches_its_requests_and_the_engine_goes_on(llm, alone, monkeypatch):
    runner = llm._built.runner
    execute, broken = runner.execute, threading.Event()
    broken.set()

    def execute_or_fail(step):
        if broken.is_set():
            broken.clear()
            raise RuntimeError("bad luck")
        return execute(step)

    monkeypatch.setattr(runner, "execute", execute_or_fail)
    with pytest.raises(RequestError, match="bad luck"):
        run(tokens_of(llm, 0))
    assert run(tokens_of(llm, 0)) == alone[0]


def test_when_the_engine_dies_every_waiter_is_told_and_health_says_so(golden, monkeypatch):
    llm = AsyncLLM(str(golden / "llama"), skip_tokenizer_init=True, num_gpu_blocks_override=64, enforce_eager=True)
    llm.check_health()

    def die(*_):
        raise MemoryError("no room for a new cache")

    monkeypatch.setattr(llm._built.runner, "execute", die)
    monkeypatch.setattr(llm._built.runner, "reset", die)

    async def two():
        return await asyncio.gather(tokens_of(llm, 0), tokens_of(llm, 1), return_exceptions=True)

    results = run(two())
    assert all(isinstance(result, EngineDeadError) for result in results)
    with pytest.raises(EngineDeadError, match="no room for a new cache"):
        llm.check_health()
    with pytest.raises(EngineDeadError):
        run(tokens_of(llm, 0))
    llm.shutdown()


def test_shutdown_tells_those_who_wait_and_ends_the_thread(golden):
    llm = AsyncLLM(str(golden / "llama"), skip_tokenizer_init=True, num_gpu_blocks_override=64, enforce_eager=True)

    async def interrupted():
        task = asyncio.create_task(tokens_of(llm, 1, greedy(400)))
        while not llm.stats.running:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            await task

    run(interrupted())
    with pytest.raises(EngineDeadError, match="shut down"):
        run(tokens_of(llm, 1))
    assert not any(thread.name == "jaxllm-engine" and thread is llm._loop._thread for thread in threading.enumerate())
