"""What tests of several folders share: a compile cache, the golden folder, the packaged model, other processes."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from jaxllm import LLM
from jaxllm.engine import step_compiler
from jaxllm.engine.build import BuiltEngine
from jaxllm.engine.step import StepProgram
from jaxllm.engine.step_compiler import SamplerSettings

TINY = 256  # a model's width up to which compiling its programs takes longer than running them
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}  # XLA's defaults
OPTIONS_OF_THE_ENGINE = step_compiler.compiler_options
COMPILERS = (step_compiler.compile_step, step_compiler.compile_sampler, step_compiler.compile_prompt_scorer)


@pytest.fixture(scope="session", autouse=True)
def _compile_cache(request: pytest.FixtureRequest) -> None:
    """One on-disk cache for all tests: engines of the same shape compile once."""
    if any(item.get_closest_marker("aot") for item in request.session.items):
        return  # what is compiled for a device that is not here cannot be read back
    assert request.config.cache is not None
    jax.config.update("jax_compilation_cache_dir", str(request.config.cache.mkdir("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _quick_options(program: StepProgram) -> dict[str, bool | int | str] | None:
    is_tiny = program.decoder.cfg.d_model <= TINY
    return OPTIONS_OF_THE_ENGINE(program) or (None if is_tiny else OPTIMISED)


@pytest.fixture(scope="session", autouse=True)
def _quick_compile(request: pytest.FixtureRequest) -> None:
    """On a CPU, LLVM optimises the steps of real models only: for all else it takes longer than it saves."""
    marks = ("aot", "gpu")
    if any(item.get_closest_marker(mark) for item in request.session.items for mark in marks):
        return
    if "jax_disable_most_optimizations" in jax.config.values:  # not every jax has it
        jax.config.update("jax_disable_most_optimizations", True)
    step_compiler.compiler_options = _quick_options


def _remembering(compile_program: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles what nobody asked for before. All that a program depends on is among the arguments, or an option."""
    kept: dict[Any, Any] = {}

    def compile_once(program: StepProgram, *given: Any) -> Any:
        key: list[Any] = [program, repr(step_compiler.compiler_options(program))]
        for each in given:
            if isinstance(each, SamplerSettings):
                if each.processors:
                    return compile_program(program, *given)  # a test's own functions
                key.append(each.logprobs_mode)
            elif not isinstance(each, AbstractContextManager):
                key.append(each)
        if (found := kept.get(tuple(key))) is None:
            found = kept[tuple(key)] = compile_program(program, *given)
        return found

    return compile_once


@pytest.fixture(scope="session", autouse=True)
def _compile_once() -> None:
    """Engines of a process share their programs: tracing and loading one takes longer than a tiny model runs it."""
    for compile_program in COMPILERS:
        setattr(step_compiler, compile_program.__name__, _remembering(compile_program))


@pytest.fixture
def optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of tiny models too are compiled as users' are."""
    monkeypatch.setattr(step_compiler, "compiler_options", lambda program: OPTIONS_OF_THE_ENGINE(program) or OPTIMISED)


@pytest.fixture
def no_compile_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing comes from that cache, nor from another engine: what does cannot be stored elsewhere."""
    for compile_program in COMPILERS:
        monkeypatch.setattr(step_compiler, compile_program.__name__, compile_program)
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def pad_to_the_largest() -> Callable[[BuiltEngine], None]:
    """Lets two shapes hold every step of an engine: tests of what is computed, not of shapes, compile no more."""

    def pad(built: BuiltEngine) -> None:
        mixed, decode = built.buckets.covering()
        built.engine._builder._choose = lambda shape: (decode if shape.program == "decode" else mixed)._replace(
            variant=shape.variant
        )

    return pad


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of checkpoints with random weights and of what they must produce."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def describe_gpu() -> Callable[[str], Any]:
    """Gives a device that is not here to compile for: "h200" as mesh/ describes it, "a100" or "l40s" as tests/gpus/."""

    def describe(name: str) -> Any:
        folder = Path(__file__).parents[1] / "mesh" if name == "h200" else Path(__file__).parent / "gpus"
        text = (folder / f"{name}.txtpb").read_text()
        topology = topologies.get_topology_desc("", platform="cuda", target_config=text, topology="1x1x1")
        return topology.devices[0]

    return describe


@pytest.fixture(scope="session")
def run_program() -> Callable[..., str]:
    """Runs Python source in a process of its own, with so many virtual CPU devices; gives what it printed.

    The number of devices is fixed when jax starts: set here, it would change for every other test too. Most of the time
    is compiling: hence LLVM's optimisations off.
    """

    def run(source: str, *arguments: object, num_devices: int = 1, timeout: float = 120) -> str:
        flags = f"--xla_force_host_platform_device_count={num_devices} --xla_backend_optimization_level=0"
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
            "NPROC": "32",  # too few threads for the devices abort the process
        }
        done = subprocess.run(
            [sys.executable, "-c", source, *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


@pytest.fixture(scope="session")
def smollm2() -> Iterator[LLM]:
    """The packaged model, started once; tests leave it idle."""
    with LLM(
        "smollm2",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        kv_cache_memory_bytes=200 << 20,
        enforce_eager=True,
    ) as llm:
        yield llm
