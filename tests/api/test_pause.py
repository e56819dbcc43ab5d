"""Pausing AsyncLLM, calls to its engine, and its end, over a scripted engine."""

import asyncio
import threading
import time
from typing import Any

import pytest

from jaxllm import SamplingParams
from jaxllm.api.errors import EngineDeadError
from jaxllm.config.errors import InputError

LONG = SamplingParams(max_tokens=900, ignore_eos=True)


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def endless(prompt: list[int], index: int) -> list[int]:
    return [1 + place % 100 for place in range(950)]


async def follow(llm: Any, params: SamplingParams = LONG, seen: list[int] | None = None, **options: Any) -> Any:
    output = None
    async for output in llm.generate("xa", params, **options):
        if seen is not None:
            seen.append(len(output.outputs[0].token_ids))
    assert output is not None
    return output.outputs[0]


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def slow(engine: Any) -> None:
    """Makes a step take a while, as a real one does."""
    step = engine.step

    def slow_step() -> Any:
        time.sleep(0.002)
        return step()

    engine.step = slow_step


def test_keep_freezes_what_runs_and_the_tokens_are_the_same_afterwards(scripted):
    llm, engine = scripted(endless)
    slow(engine)

    async def main() -> Any:
        seen: list[int] = []
        task = asyncio.create_task(follow(llm, SamplingParams(max_tokens=60), seen))
        await until(lambda: len(seen) > 5)
        assert not await llm.is_paused()
        await llm.pause_generation(mode="keep", clear_cache=False)
        assert await llm.is_paused()
        await asyncio.sleep(0.02)
        frozen = len(seen)
        late = asyncio.create_task(follow(llm, SamplingParams(max_tokens=3)))
        await asyncio.sleep(0.05)
        assert len(seen) == frozen < 60
        assert not late.done()
        await llm.resume_generation()
        return await task, await late

    kept, late = run(main())
    assert kept.token_ids == endless([], 0)[:60]
    assert late.token_ids == [1, 2, 3]
    assert engine.calls == ["pause keep", "resume"]


def test_abort_ends_what_runs_and_what_comes_while_paused_waits(scripted):
    llm, engine = scripted(endless)
    slow(engine)

    async def main() -> None:
        tasks = [asyncio.create_task(follow(llm)) for _ in range(5)]
        await until(lambda: len(engine._living) == 5)
        await llm.pause_generation()
        assert [(await task).finish_reason for task in tasks] == ["abort"] * 5
        late = asyncio.create_task(follow(llm, SamplingParams(max_tokens=3)))
        await asyncio.sleep(0.05)
        assert not late.done()
        await llm.resume_generation()
        assert (await late).finish_reason == "length"

    run(main())
    assert engine.calls == ["pause keep", "pause drop", "resume"]


def test_wait_lets_what_runs_end_and_holds_back_what_comes(scripted):
    llm, engine = scripted(endless)
    slow(engine)

    async def main() -> None:
        tasks = [asyncio.create_task(follow(llm, SamplingParams(max_tokens=40))) for _ in range(3)]
        await until(lambda: len(engine._living) == 3)
        pause = asyncio.create_task(llm.pause_generation(mode="wait"))
        await asyncio.sleep(0.01)
        late = [asyncio.create_task(follow(llm, SamplingParams(max_tokens=3), request_id=f"late{i}")) for i in range(2)]
        await asyncio.sleep(0.01)
        assert not pause.done()
        await llm.abort("late1")
        assert (await late[1]).finish_reason == "abort"
        await pause
        assert [(await task).finish_reason for task in tasks] == ["length"] * 3
        assert await llm.is_paused()
        await asyncio.sleep(0.03)
        assert not late[0].done()
        with pytest.raises(InputError, match="paused already"):
            await llm.pause_generation(mode="wait")
        await llm.resume_generation()
        assert len((await late[0]).token_ids) == 3

    run(main())


def test_wait_needs_nobody_to_read_what_it_waits_for(scripted):
    llm, _ = scripted(endless)

    async def main() -> int:
        num_tokens = 0
        async for delta in llm.stream("xa", SamplingParams(max_tokens=50)):
            if num_tokens == 0:
                await llm.pause_generation(mode="wait")
            num_tokens += len(delta.token_ids)  # all others come at once: nobody read them meanwhile
        await llm.resume_generation()
        return num_tokens

    assert run(main()) == 50


def test_a_wait_that_is_cancelled_lets_go_of_what_it_held_back(scripted):
    llm, engine = scripted(endless)
    slow(engine)

    async def main() -> None:
        task = asyncio.create_task(follow(llm))
        await until(lambda: engine._living)
        pause = asyncio.create_task(llm.pause_generation(mode="wait"))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(follow(llm, SamplingParams(max_tokens=3)))
        await asyncio.sleep(0.01)
        pause.cancel()
        await asyncio.gather(pause, return_exceptions=True)
        assert len((await late).token_ids) == 3
        again = asyncio.create_task(llm.pause_generation(mode="wait"))
        await asyncio.sleep(0.01)
        await llm.abort_all()
        await again
        assert (await task).finish_reason == "abort"

    run(main())


def test_an_unknown_mode_is_refused(scripted):
    llm, _ = scripted(endless)
    with pytest.raises(InputError, match="mode must be abort, wait or keep, got 'hold'"):
        run(llm.pause_generation(mode="hold"))


def test_calls_of_the_engine_give_its_answer_or_its_error(scripted):
    llm, engine = scripted(endless)
    slow(engine)

    async def main() -> None:
        assert await llm.reset_prefix_cache() is True
        task = asyncio.create_task(follow(llm))
        await until(lambda: engine._living)
        assert await llm.reset_prefix_cache() is False
        with pytest.raises(InputError, match="a profile is being taken already"):
            await llm.start_profile("taken")
        with pytest.raises(RuntimeError, match="start_profile failed: OSError: disk full"):
            await llm.start_profile()
        await llm.stop_profile()
        with pytest.raises(RuntimeError, match="there is no engine call 'close'"):
            await llm._call("close")
        task.cancel()

    run(main())
    assert engine.calls == ["stop_profile"]


def test_callers_on_two_event_loops_in_two_threads_are_served_at_once(scripted):
    llm, engine = scripted(endless)
    slow(engine)
    both = threading.Barrier(2, timeout=20)
    lengths: dict[int, list[int]] = {}

    def caller(index: int) -> None:
        async def mine() -> list[int]:
            tasks = [asyncio.create_task(follow(llm, SamplingParams(max_tokens=20 + i + index))) for i in range(10)]
            await until(lambda: engine._living)
            await asyncio.to_thread(both.wait)
            assert await llm.reset_prefix_cache() is False
            return [len((await task).token_ids) for task in tasks]

        lengths[index] = run(mine())

    threads = [threading.Thread(target=caller, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert lengths == {index: [20 + i + index for i in range(10)] for index in range(2)}


def test_shutdown_tells_everyone_who_waits_and_leaves_no_task_and_no_thread(scripted):
    llm, engine = scripted(endless)
    slow(engine)

    async def main() -> None:
        tasks = [asyncio.create_task(follow(llm)) for _ in range(5)]
        await until(lambda: len(engine._living) == 5)
        engine.is_paused = True  # a call of the engine's that never comes back is told too
        waiting = asyncio.create_task(llm.pause_generation(mode="wait"))
        await asyncio.to_thread(llm.shutdown)
        results = await asyncio.gather(*tasks, waiting, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError | InputError) for result in results)
        with pytest.raises(EngineDeadError, match="shut down"):
            await follow(llm)
        with pytest.raises(EngineDeadError, match="shut down"):
            await llm.is_paused()
        assert len(asyncio.all_tasks()) == 1 + (asyncio.current_task() not in asyncio.all_tasks())

    run(main())
    assert not llm._loop._thread.is_alive()
    assert len(llm._listeners) == 0
    assert engine.calls == ["close"]
    llm.shutdown()


def test_an_event_loop_that_closes_first_hurts_nobody(scripted):
    llm, engine = scripted(endless)
    slow(engine)
    abandoned: list[Any] = []

    async def start_and_leave() -> None:
        deltas = llm.stream("xa", LONG)
        await anext(deltas)
        abandoned.append(deltas)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(start_and_leave())
    loop.close()
    assert len(run(follow(llm, SamplingParams(max_tokens=30))).token_ids) == 30
    llm.shutdown()
    assert not llm._loop._thread.is_alive()
    deltas = abandoned.pop()
    with pytest.raises(StopIteration):  # what the interpreter does with a generator that nobody closed
        deltas.aclose().send(None)
