"""Which shape a step runs in while others are being compiled, with stand-ins for the compiled programs."""

import threading

import pytest

from jaxllm.engine import step_compiler
from jaxllm.engine.buckets import StepShape, Variant
from jaxllm.engine.sampler_inputs import SamplerShape
from jaxllm.engine.step_compiler import SamplerSettings, StepCompiler, usual_samplers


class Program:
    def memory_analysis(self) -> None:
        return None


@pytest.fixture
def gates(monkeypatch):
    """Compiling a shape takes until its gate opens; a shape without one compiles at once."""
    gates: dict[object, threading.Event] = {}
    counts: dict[object, int] = {}

    def compile_program(program, shape, *rest) -> Program:
        counts[shape] = counts.get(shape, 0) + 1
        assert gates.get(shape, _OPEN).wait(10)
        return Program()

    monkeypatch.setattr(step_compiler, "compile_step", compile_program)
    monkeypatch.setattr(step_compiler, "compile_sampler", compile_program)
    yield gates, counts
    for gate in gates.values():
        gate.set()


_OPEN = threading.Event()
_OPEN.set()


def decode(size: int, variant: Variant = "greedy", width: int = 64) -> StepShape:
    return StepShape(size, size, width, variant)


def compiler_of(shapes, gates, closed) -> StepCompiler:
    gates |= {shape: threading.Event() for shape in closed}
    compiler = StepCompiler(None, 8, 4, SamplerSettings())  # pyright: ignore[reportArgumentType]
    compiler.warm_up(shapes, len(shapes))
    for shape in set(shapes) - set(closed):
        compiler.get(shape) if isinstance(shape, StepShape) else compiler.get_sampler(shape)
    while len(compiler._planned) > len(closed):
        threading.Event().wait(0.001)
    return compiler


def test_the_smallest_compiled_shape_that_holds_the_step_stands_in_for_its_own(gates):
    gates, _ = gates
    compiler = compiler_of([decode(1), decode(4), decode(8), decode(16)], gates, [decode(1), decode(4)])
    assert compiler.stand_in(decode(1)) == decode(8)
    assert compiler.stand_in(decode(8)) == decode(8)
    gates[decode(4)].set()
    compiler.get(decode(4))
    assert compiler.stand_in(decode(1)) == decode(4)
    gates[decode(1)].set()
    assert compiler.wait(10)
    assert compiler.stand_in(decode(1)) == decode(1)
    compiler.close()


def test_only_a_shape_of_the_same_program_that_gives_enough_and_is_no_smaller_stands_in(gates):
    gates, _ = gates
    ready = [StepShape(32, 16, 64, "logits"), decode(16), decode(16, "logits", width=32), decode(2, "logits")]
    compiler = compiler_of([*ready, decode(4, "logits")], gates, [decode(4, "logits")])
    assert compiler.stand_in(decode(4, "logits")) == decode(4, "logits")
    gates[decode(4, "logits")].set()
    compiler.close()


def test_logits_and_a_sampler_stand_in_for_a_greedy_step_unless_a_greedy_shape_is_as_small(gates):
    gates, _ = gates
    compiler = compiler_of(
        [decode(1), decode(4), decode(8, "logits"), decode(8)], gates, [decode(1), decode(4), decode(8)]
    )
    assert compiler.stand_in(decode(1)) == decode(8, "logits")
    gates[decode(8)].set()
    compiler.get(decode(8))
    assert compiler.stand_in(decode(1)) == decode(8)
    gates[decode(4)].set()
    gates[decode(1)].set()
    compiler.close()


def test_a_shape_that_is_not_planned_is_compiled_at_first_use(gates):
    gates, _ = gates
    compiler = compiler_of([decode(1), decode(8)], gates, [decode(1)])
    assert compiler.stand_in(decode(4)) == decode(4)
    assert compiler.stand_in(decode(4, "hidden")) == decode(4, "hidden")
    gates[decode(1)].set()
    compiler.close()


def test_logits_are_used_when_their_samplers_are_compiled_too(gates):
    gates, _ = gates
    late = SamplerShape(4, filters=True)
    shapes = [decode(4, "logits"), decode(16, "logits"), *usual_samplers(4), *usual_samplers(16)]
    compiler = compiler_of(shapes, gates, [late])
    assert compiler.stand_in(decode(4, "logits")) == decode(16, "logits")
    gates[late].set()
    assert compiler.wait(10)
    assert compiler.stand_in(decode(4, "logits")) == decode(4, "logits")


def test_who_asks_for_what_is_being_compiled_waits_for_it(gates):
    gates, counts = gates
    gates[decode(1)] = threading.Event()
    compiler = StepCompiler(None, 8, 4, SamplerSettings())  # pyright: ignore[reportArgumentType]
    compiler.warm_up([decode(1)], 1)
    threading.Timer(0.05, gates[decode(1)].set).start()
    asked = compiler.get(decode(1))
    assert compiler.wait(10)
    assert asked is compiler.get(decode(1))
    assert counts == {decode(1): 1}


def test_progress_says_how_many_are_ready_and_when_all_were(gates):
    gates, _ = gates
    compiler = compiler_of([decode(1), decode(8)], gates, [decode(1)])
    assert compiler.progress(0.0) == "1 of 2; the others follow behind"
    gates[decode(1)].set()
    assert compiler.wait(10)
    assert compiler.progress(compiler.finished or 0.0) == "all 2 after 0.0 s"


def test_a_close_waits_for_what_is_compiled_and_traces_nothing_more(monkeypatch, caplog):
    traced, begun, go_on = [], threading.Event(), threading.Event()

    def compile_program(program, shape, *rest) -> Program:
        with rest[-1]:
            traced.append(shape)
            begun.set()
            assert go_on.wait(10)
        return Program()

    monkeypatch.setattr(step_compiler, "compile_step", compile_program)
    compiler = StepCompiler(None, 8, 4, SamplerSettings())  # pyright: ignore[reportArgumentType]
    compiler.warm_up([decode(size) for size in range(1, 9)], 4)
    assert begun.wait(10)
    threading.Timer(0.1, go_on.set).start()
    compiler.close()
    assert len(traced) == 1
    assert not caplog.messages
