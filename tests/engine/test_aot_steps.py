"""Whole steps compiled for an H200 that is not here: what they launch for each layer, and that they copy little."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from jaxllm.engine import step_compiler
from jaxllm.engine.buckets import StepShape
from jaxllm.engine.sampler_inputs import SamplerShape
from jaxllm.engine.step import StepProgram
from jaxllm.kernels.all_reduce.reference import all_reduce
from jaxllm.kernels.launch import compiling_for
from jaxllm.kernels.select import select
from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.build import build_mesh
from jaxllm.mesh.targets import target_devices
from jaxllm.models.forward import build_program
from jaxllm.models.registry import find_family
from jaxllm.models.step_context import Kernels

pytestmark = pytest.mark.aot

SHAPES = Path(step_compiler.__file__).parents[1] / "models" / "shapes"
DECODE, MIXED = StepShape(64, 64, 1024, "greedy"), StepShape(512, 16, 1024, "greedy")
NUM_BLOCKS = 4096
CACHE_BYTES = 100_000_000_000  # of one that fills the card: an H200 has 151 GB

# What a layer launches at most, of kernels and of copies that are nodes of a graph. A decode layer: two norms, four
# products, rope with the write, attention, the gated activation; and, where the table of measured products has another
# kernel than cuBLASLt, the sum of a split product (8B: q|k|v) and the residual's. A mixed layer has a second attention
# kernel, and copies its two norms' weights and counts the layers; the lists of chunks and tiles are made before the
# loop. Whoever makes it less lowers the number.
MOST_LAUNCHES = {
    ("llama-3.1-8b", DECODE): 11,
    ("llama-3.1-8b", MIXED): 14,
    ("qwen3-0.6b", DECODE): 10,
    ("qwen3-0.6b", MIXED): 13,
}
MODELS = ("llama-3.1-8b", "qwen3-0.6b")


class Thunk(NamedTuple):
    """One line of what XLA lists as the program's schedule: its kind, its own text, and the kinds that enclose it."""

    kind: str
    text: str
    within: tuple[str, ...]

    @property
    def is_launch(self) -> bool:
        return self.kind in ("kCustomKernel", "kKernel", "kCustomCall", "kCublasLtMatmul", "kGemm", "kCopy", "kMemset")


class CompiledStep(NamedTuple):
    """A step of a model with so many layers, and its schedule."""

    program: StepProgram
    compiled: jax.stages.Compiled
    thunks: list[Thunk]


@pytest.fixture(scope="module")
def compile_step(tmp_path_factory) -> Callable[..., CompiledStep]:
    """Compiles a step, or a sampler, with the options of the engine, and has XLA write down what it will launch."""
    options_of_the_engine = step_compiler.compiler_options

    def compile_step(
        model: str,
        num_layers: int,
        shape: StepShape | SamplerShape,
        data: int = 1,
        tensor: int = 1,
        writes_to_peers: bool = False,
        num_blocks: int = NUM_BLOCKS,
    ) -> CompiledStep:
        gpus = target_devices("h200", data * tensor)
        hf = json.loads((SHAPES / f"{model}.json").read_text()) | {"num_hidden_layers": num_layers}
        hf.pop("layer_types", None)
        cfg = dataclasses.replace(find_family(hf)[1].configure(hf), dtype="bfloat16").split(tensor)
        folder = tmp_path_factory.mktemp("dump")
        dump = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
        with pytest.MonkeyPatch.context() as patch, compiling_for(gpus[0]):
            patch.setattr(step_compiler, "compiler_options", lambda p: (options_of_the_engine(p) or {}) | dump)
            kernels = Kernels(*(select(name, platform="gpu") for name in Kernels._fields))
            mesh = build_mesh(data, tensor, gpus)
            if not writes_to_peers:
                kernels = kernels._replace(all_reduce=all_reduce)
            captured = data * tensor > 1 and not writes_to_peers
            program = StepProgram(build_program(cfg), kernels, mesh, AxisRules(), 16, capture_collectives=captured)
            assert program.writes_to_peers == writes_to_peers
            if isinstance(shape, StepShape):
                compiled = step_compiler.compile_step(program, shape, num_blocks, 256)
            else:
                compiled = step_compiler.compile_sampler(program, shape, 256, step_compiler.SamplerSettings())
        (schedule,) = folder.glob("*.thunk_sequence_after_thunk_passes.txt")
        return CompiledStep(program, compiled, parse_thunks(schedule.read_text()))

    return compile_step


def parse_thunks(text: str) -> list[Thunk]:
    """Reads the schedule, whose indentation says what is in what."""
    thunks: list[Thunk] = []
    open_at: list[tuple[int, str]] = []
    for line in text.splitlines():
        entry = re.match(r"( *)(?:\d+: (\w+) .*|(condition|body):)$", line)
        assert entry, line
        depth, kind = len(entry[1]), entry[2] or entry[3]
        if kind == "condition":
            depth += 2  # "condition" stands two places left of "body", where it belongs
        while open_at and open_at[-1][0] >= depth:
            open_at.pop()
        if entry[2]:
            thunks.append(Thunk(kind, line.strip(), tuple(k for _, k in open_at)))
        open_at.append((depth, kind))
    return thunks


@pytest.fixture(scope="module", params=MODELS)
def decode(request, compile_step) -> tuple[str, CompiledStep, CompiledStep]:
    """A decode step with two layers, and one with three: the difference is a layer."""
    return request.param, compile_step(request.param, 2, DECODE), compile_step(request.param, 3, DECODE)


@pytest.fixture(scope="module", params=MODELS)
def mixed(request, compile_step) -> tuple[str, CompiledStep]:
    return request.param, compile_step(request.param, 2, MIXED)


def test_a_decode_step_is_one_graph_with_few_launches_for_each_layer(decode):
    model, two, three = decode
    for step in (two, three):
        assert [t.kind for t in step.thunks if not t.within] == ["kCommandBuffer"]
    launched = [[t for t in step.thunks if t.is_launch] for step in (two, three)]
    layer = [t.text for t in launched[1]][-len(launched[1]) // 3 :]
    assert len(launched[1]) - len(launched[0]) <= MOST_LAUNCHES[model, DECODE], "\n".join(layer)


def test_a_mixed_step_is_graphs_around_and_in_the_loop_over_the_layers(mixed):
    model, step = mixed
    assert [t.kind for t in step.thunks if not t.within] == ["kCommandBuffer", "kWhile", "kCommandBuffer"]
    outside = [t for t in step.thunks if t.is_launch and "kCommandBuffer" not in t.within]
    assert [t.within[-1] for t in outside] == ["condition"], outside
    layer = [t.text for t in step.thunks if t.is_launch and "body" in t.within]
    assert 10 <= len(layer) <= MOST_LAUNCHES[model, MIXED], "\n".join(layer)


def test_a_decode_step_copies_neither_cache_nor_weights(decode):
    for step in decode[1:]:
        assert_nothing_big_is_made(step)


def test_a_cache_that_fills_the_card_makes_no_launch_more(decode, compile_step):
    model, two, _ = decode
    bytes_of_a_block = 2 * math.prod(two.program.kv_shape(1))
    fills = compile_step(model, 2, DECODE, num_blocks=CACHE_BYTES // bytes_of_a_block)
    assert sum(t.is_launch for t in fills.thunks) == sum(t.is_launch for t in two.thunks)


def test_a_mixed_step_copies_neither_cache_nor_weights(mixed):
    assert_nothing_big_is_made(mixed[1])


@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (1, 2), (2, 2), (1, 8), (4, 2)])
def test_a_decode_step_over_several_gpus_is_one_graph_with_two_all_reduces_for_each_layer(data, tensor, compile_step):
    step = compile_step("llama-3.1-8b", 2, DECODE, data, tensor)
    assert [t.kind for t in step.thunks if not t.within] == ["kCommandBuffer"]
    all_reduces = [t.text for t in step.thunks if t.kind == "kAllReduce"]
    assert len(all_reduces) == (1 + 2 * 2 if tensor > 1 else 0), "\n".join(all_reduces)  # one of the embedding


@pytest.mark.parametrize("num_tokens", [1, 64])
def test_a_decode_step_whose_ranks_write_to_each_other_is_one_graph_without_collectives(num_tokens, compile_step):
    shape = StepShape(num_tokens, num_tokens, 1024, "greedy")
    ours = compile_step("llama-3.1-8b", 2, shape, tensor=2, writes_to_peers=True)
    assert [t.kind for t in ours.thunks if not t.within] == ["kCommandBuffer"]
    assert not {kind for t in ours.thunks for kind in (t.kind, *t.within) if re.search("All|Collective", kind)}
    text = ours.compiled.as_text() or ""
    assert not re.search(r"= \S+ (all-reduce|all-gather)", text)
    # Of the embedding, two of each layer unless its products add up by themselves, and one of the best token.
    exchanges = re.findall(r'custom-call\(.*triton_kernel_call_ffi.*op_name="[^"]*exchange_words', text)
    assert len(exchanges) == (2 if num_tokens == 1 else 2 + 2 * 2)


@pytest.mark.parametrize("options", [{}, {"filters": True, "num_best": 8}])
def test_a_sampler_over_several_gpus_is_one_graph(options, compile_step):
    step = compile_step("llama-3.1-8b", 2, SamplerShape(64, **options), 2, 4)
    assert [t.kind for t in step.thunks if not t.within] == ["kCommandBuffer"]


def test_a_mixed_step_over_several_gpus_is_graphs_around_and_in_the_loop_over_the_layers(compile_step):
    step = compile_step("llama-3.1-8b", 2, MIXED, 1, 2)
    assert [t.kind for t in step.thunks if not t.within] == ["kCommandBuffer", "kWhile", "kCommandBuffer"]
    all_reduces = [t.within for t in step.thunks if t.kind == "kAllReduce"]
    assert ["body" in within for within in all_reduces] == [False, True, True]  # the embedding's, and a layer's
    assert all("kCommandBuffer" in within for within in all_reduces)


def assert_nothing_big_is_made(step: CompiledStep) -> None:
    """No instruction gives an array as large as cache or weights, whole or of a layer, but those that update in place.

    What calls a kernel or a library updates in place: XLA checks it, and the count of aliased bytes shows it.
    """
    kv_shape = step.program.kv_shape(NUM_BLOCKS)
    sizes = {math.prod(kv_shape), math.prod(kv_shape[1:])}
    for spec in step.program.decoder.params:
        if spec.role == "matrix":
            sizes |= {math.prod(spec.stored_shape), math.prod(spec.shape)}
    hlo = step.compiled.as_text()
    assert hlo is not None
    assert made_of(sizes, hlo) == []
    memory = step.compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= math.prod(kv_shape) * 2
    assert memory.temp_size_in_bytes < math.prod(kv_shape[1:]) * 2


def made_of(sizes: set[int], hlo: str) -> list[str]:
    """Names the instructions that make an array of so many elements."""
    made = []
    for name, result, operation, rest in instructions(hlo):
        in_place = operation in (*PASS_ON, "custom-call") or "calls=%dynamic-slice-fusion" in rest
        counts = {math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]", result)}
        if not in_place and sizes & counts:
            made.append(f"{name}: {operation} gives {result}")
    return made


PASS_ON = ("parameter", "get-tuple-element", "tuple", "bitcast", "while")


def instructions(hlo: str) -> list[tuple[str, str, str, str]]:
    """Name, result, operation and the rest of what the program itself and the bodies of its loops run."""
    bodies = set(re.findall(r"body=%([\w.\-]+)", hlo))
    found = []
    for computation in re.split(r"\n\n", hlo):
        head = re.match(r"(ENTRY )?%([\w.\-]+) \(", computation)
        if head and (head[1] or head[2] in bodies):
            found += re.findall(r"^  (?:ROOT )?%(\S+) = (\(.+?\)|\S+) ([a-z\-]+)\((.*)$", computation, re.MULTILINE)
    assert found
    return found


def test_the_schedule_is_read_with_what_encloses_each_line():
    text = """000: kCommandBuffer [source | next=002 (1)]
    001: kCopy [source | sink] kCopy
002: kWhile         [prev=000 (1) | sink]
condition:
    003: kCustomKernel [source | sink] compare grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        004: kDynamicSliceFusion [source | sink] params=2
            005: kCublasLtMatmul [source | sink] kCublasLtMatmul
006: kCustomKernel [source | sink] last
"""
    assert [(t.kind, *t.within) for t in parse_thunks(text)] == [
        ("kCommandBuffer",),
        ("kCopy", "kCommandBuffer"),
        ("kWhile",),
        ("kCustomKernel", "kWhile", "condition"),
        ("kCommandBuffer", "kWhile", "body"),
        ("kDynamicSliceFusion", "kWhile", "body", "kCommandBuffer"),
        ("kCublasLtMatmul", "kWhile", "body", "kCommandBuffer", "kDynamicSliceFusion"),
        ("kCustomKernel",),
    ]


def test_a_copy_is_found_in_the_program_and_in_its_loops_but_not_in_a_fusion():
    hlo = """HloModule step

%fused (p: bf16[2,8]) -> bf16[2,8] {
  ROOT %inside = bf16[2,8]{1,0} copy(%p)
}

%layer (carry: (s32[], bf16[2,8])) -> (s32[], bf16[2,8]) {
  %kv = bf16[2,8]{1,0} get-tuple-element(%carry), index=1
  %a = (bf16[2,8]{1,0}, s8[4]{0}) fusion(%kv), kind=kCustom, calls=%dynamic-slice-fusion.3, metadata={}
  ROOT %b = (s32[], bf16[16]{0}) fusion(%kv), kind=kLoop, calls=%fused
}

ENTRY %main (kv.1: bf16[2,8]) -> bf16[2,8] {
  %kv.1 = bf16[2,8]{1,0} parameter(0)
  %while.1 = (s32[], bf16[2,8]{1,0}) while(%tuple.1), condition=%compare, body=%layer
  ROOT %c = bf16[2,8]{1,0} copy(%kv.1)
}
"""
    made = made_of({16}, hlo)
    assert [each.split(":")[0] for each in made] == ["b", "c"]
    assert made_of({17}, hlo) == []
