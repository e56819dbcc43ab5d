"""`jaxllm bench mesh`: the same requests on several shapes of the mesh, one engine after the other.

On a CPU the devices are virtual ones, as many as the largest shape needs: they share the cores, so that only the counts
of collectives and the shares of padding say something about other machines.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.bench.args import MeshArgs, add_bench_flags, bench_engine_args, sorted_values
from jaxllm.config.errors import InputError
from jaxllm.config.writable import check_writable
from jaxllm.environment import offer_virtual_devices, prepare_environment
from jaxllm.options import OptionParser

if TYPE_CHECKING:  # what measures is imported when it is called: --help and mistakes need none of it
    from jaxllm.bench.collectives import Collective

TITLE = "bench mesh"
_DEFAULTS = {"model": "llama-tiny", "load_format": "dummy", "use_tqdm_on_load": False}
_HEADER = (
    *("data x tensor", "devices", "out tok/s", "per device", "padding", "decode step"),
    *("all-reduces", "other collectives", "bytes a step"),
)


class MeshResult(NamedTuple):
    """What one shape of the mesh brought; the collectives are those of its largest decode step."""

    data: int
    tensor: int
    tokens_per_second: float
    padding_share: float
    decode_step: str
    collectives: "list[Collective]"

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags and the engine's."""
    add_bench_flags(parser, MeshArgs, TITLE)


def run(values: dict[str, Any]) -> int:
    """Measures; gives the exit code.

    Raises:
        InputError: a mistake of the user's, or no shape that the devices allow.
    """
    args, options = sorted_values(MeshArgs, values)
    for name in ("data_parallel_size", "tensor_parallel_size"):
        if name in options:
            raise InputError(f"{name} is set by bench mesh: name the shapes with --shapes {args.shapes}")
    sizes = args.sizes()
    bench_engine_args(_engine_options(options, 1, 1, args.num_prompts))
    prepare_environment(os.environ)
    offer_virtual_devices(os.environ, max(data * tensor for data, tensor in sizes))
    import jax

    from jaxllm.bench.provenance import command_line, commit
    from jaxllm.bench.report import print_facts, print_table, tell, write_json

    check_writable("output_json", args.output_json)
    devices = jax.devices()
    allowed = [(data, tensor) for data, tensor in sizes if data * tensor <= len(devices)]
    for data, tensor in sizes:
        if (data, tensor) not in allowed:
            tell(f"{data}x{tensor} is left out: it needs {data * tensor} devices, found {len(devices)}")
    if not allowed:
        raise InputError(f"shapes: none of {args.shapes} fits on {len(devices)} {devices[0].device_kind}")
    facts = {
        "command": command_line(TITLE, values),
        "commit": commit(),
        "device": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "model": _engine_options(options, 1, 1, args.num_prompts)["model"],
    }
    print_facts(facts)
    results: list[MeshResult] = []
    for data, tensor in allowed:
        try:
            results.append(_measure(args, options, data, tensor))
        except InputError as error:  # of this shape; the others may do
            tell(f"{data}x{tensor} is left out: {error}")
    print_table(_HEADER, [_row(result) for result in results])
    write_json(args.output_json, {**facts, "results": [_as_json(result) for result in results]})
    return 0 if results else 1


def _engine_options(options: Mapping[str, Any], data: int, tensor: int, num_prompts: int) -> dict[str, Any]:
    """All shapes hold the same requests at once: with several data ranks each has its share of the rows."""
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor, "max_num_seqs": -(-num_prompts // data)}
    return {**_DEFAULTS, **options, **sizes, "max_num_seqs": options.get("max_num_seqs", sizes["max_num_seqs"])}


def _measure(args: MeshArgs, options: Mapping[str, Any], data: int, tensor: int) -> MeshResult:
    from jaxllm.bench.collectives import collectives
    from jaxllm.bench.own_engine import OwnEngine
    from jaxllm.bench.throughput import measure_at_once
    from jaxllm.bench.workloads import random_requests

    engine = bench_engine_args(_engine_options(options, data, tensor, args.num_prompts))
    subject = OwnEngine(engine)
    try:
        drawn = [
            random_requests(args.num_prompts, args.input_len, args.output_len, engine.seed, repeat) for repeat in (0, 1)
        ]
        measured, _ = measure_at_once(subject, f"{data}x{tensor}", *drawn)
        name, text = subject.largest_decode_step()
    finally:
        subject.close()
    assert measured.steps is not None
    return MeshResult(
        data,
        tensor,
        measured.output_tokens_per_second,
        measured.steps.padding_share,
        name,
        collectives(text, {"data": data, "tensor": tensor}),
    )


def _row(result: MeshResult) -> tuple[str, ...]:
    all_reduces = [c for c in result.collectives if c.kind == "all-reduce"]
    others = [c for c in result.collectives if c.kind != "all-reduce"]
    num_bytes = sum(c.number * c.num_bytes for c in result.collectives)
    return (
        f"{result.data}x{result.tensor}",
        str(result.num_devices),
        f"{result.tokens_per_second:,.1f}",
        f"{result.tokens_per_second / result.num_devices:,.1f}",
        f"{result.padding_share:.1%}",
        result.decode_step,
        str(sum(c.number for c in all_reduces)),
        str(sum(c.number for c in others)),
        f"{num_bytes:,}",
    )


def _as_json(result: MeshResult) -> dict[str, Any]:
    return result._asdict() | {"collectives": [c._asdict() for c in result.collectives]}
