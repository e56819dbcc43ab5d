"""Calibration as a Python call. Starts an engine, has its steps timed and a device fitted; prints nothing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.api.start import start_engine
from jaxllm.calibrate.fit import errors_of, fit, host_of, median_error, split
from jaxllm.calibrate.measure import Timed, grid, time_steps
from jaxllm.config.engine_args import engine_args
from jaxllm.config.errors import InputError
from jaxllm.engine.build import BuiltEngine
from jaxllm.engine.input_builder import InputBuilder
from jaxllm.engine.memory import device_memory, host_memory
from jaxllm.mesh.cost_model import DeviceSpec, Link, ModelShape
from jaxllm.planning.model_shape import shape_of

_LINK = Link(ranks=8, latency_us=40.0, bandwidth=300e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A described device, and the steps that it was fitted to and tested on."""

    shape: ModelShape
    device: DeviceSpec
    fitted: list[Timed]
    tested: list[Timed]

    @property
    def error_of_fitted(self) -> float:
        return median_error(errors_of(self.shape, self.device, self.fitted))

    @property
    def error_of_tested(self) -> float:
        return median_error(errors_of(self.shape, self.device, self.tested))

    def rows(self) -> Iterator[list[str]]:
        """Yields each step with its measured and predicted time."""
        for steps, said in ((self.fitted, ""), (self.tested, "test")):
            for step, error in zip(steps, errors_of(self.shape, self.device, steps), strict=True):
                name = f"{step.shape.program} T={step.shape.num_tokens} B={step.shape.num_requests}"
                times = [f"{1e3 * step.seconds:.2f}", f"{1e3 * step.seconds * (1 + error):.2f}", f"{error:+.1%}"]
                yield [name, str(step.case.start + step.case.num_tokens), *times, said]


def calibrate(
    model: str,
    max_context: int = 1024,
    repeats: int = 5,
    progress: Callable[[Timed], None] = lambda timed: None,
    **options: Any,
) -> Calibration:
    """Measures a grid of steps on one device, fits to half of their shapes and tests on the others.

    `options` are flags of the engine.

    Raises:
        InputError: the engine cannot start so, or has too few shapes.
    """
    args = engine_args({"model": model, "skip_tokenizer_init": True, "max_model_len": max_context + 1, **options})
    built = start_engine(args).built
    try:
        built.wait_until_compiled()
        builder = _builder(built)
        steps = time_steps(built, builder, args.block_size, grid(built.buckets, max_context), repeats, progress)
        beginning, shape = _beginning(built), shape_of(built.model, model)
    finally:
        built.close()
    fitted, tested = split(steps)
    if not tested:
        raise InputError("there are too few shapes of steps to test on some: raise max_num_seqs")
    host_us, host_request_us = host_of(steps)
    device = replace(fit(shape, beginning, fitted), host_us=host_us, host_request_us=host_request_us)
    return Calibration(shape=shape, device=device, fitted=fitted, tested=tested)


def _builder(built: BuiltEngine) -> InputBuilder:
    """One of its own, which no request of the engine's has gone through."""
    max_blocks = built.buckets.table_widths[-1]
    windows = built.model.kv_layout.windows
    return InputBuilder(
        built.buckets, built.compiler.num_rows, max_blocks, len(windows), vocab_size=built.model.vocab_size
    )


def _beginning(built: BuiltEngine) -> DeviceSpec:
    """Where the fit begins: a processor's orders of magnitude, or a card's."""
    device = built.runner.program.mesh.devices.flat[0]
    is_cpu = device.platform == "cpu"
    return DeviceSpec(
        name=device.device_kind.replace(" ", "-"),
        measured=True,
        source="jaxllm calibrate; not measured: the links, and of the host what is beyond building a step's inputs",
        memory_bytes=host_memory() if is_cpu else device_memory(device),
        read_bandwidth=1e10 if is_cpu else 2e12,
        copy_bandwidth=1e10 if is_cpu else 2e12,
        matmul_flops=5e10 if is_cpu else 4e14,
        attention_flops=2e10 if is_cpu else 2e14,
        blend=2.0,
        product_us=50.0 if is_cpu else 7.0,
        kernel_us=0.0 if is_cpu else 1.4,
        kernels_per_layer=6,
        mixed_layer_us=50.0 if is_cpu else 30.0,
        request_layer_us=50.0 if is_cpu else 0.0,
        host_us=0.0,  # while steps are fitted
        host_request_us=0.0,
        node_size=8,
        links=(_LINK,),
        between_nodes=Link(ranks=16, latency_us=80.0, bandwidth=40e9),
    )
