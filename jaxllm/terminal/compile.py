"""`jaxllm compile`: fills a folder of executables, on the machine that serves or without its GPU. Reads no weights."""

import logging
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from jaxllm.config.engine_args import HIDDEN, EngineArgs, engine_args, flag
from jaxllm.config.errors import InputError
from jaxllm.environment import prepare_environment
from jaxllm.options import OptionParser, add_hidden_options, add_model_argument, add_options, with_model


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileArgs:
    """Flags of `compile`."""

    output: str | None = flag(None, "folder for the executables: what --executables names at a start")
    device: str | None = flag(None, "card to compile for without having one (h200); default: this machine's device")


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags and the engine's, on which programs depend."""
    add_model_argument(parser)
    add_options(parser, CompileArgs, "compile")
    add_options(parser, EngineArgs, "EngineConfig", grouped=True, without=("executables",))
    add_hidden_options(parser, HIDDEN)


def run(values: dict[str, Any]) -> int:
    """Compiles every planned program; gives the exit code.

    Raises:
        InputError: a mistake of the user's.
    """
    given = with_model(values)
    args = CompileArgs(output=given.pop("output", None), device=given.pop("device", None))
    if args.output is None:
        raise InputError("output is missing: name the folder for the executables")
    engine = engine_args({**given, "executables": args.output})
    if engine.nnodes > 1:
        raise InputError(f"nnodes={engine.nnodes}: programs of several processes cannot be kept in a folder")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    prepare_environment(os.environ, has_store=True)
    if args.device is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a card that happens to be here is left alone
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # the arguments fill most of the card, which XLA takes for an error
    compile_ahead(engine, args.device)
    return 0


def compile_ahead(engine: EngineArgs, device: str | None) -> None:
    """Compiles for a card, or for this machine's device, and says what came of it.

    Raises:
        InputError: the card is not known, or see `find_model` and `prepare`.
    """
    # Takes seconds, which a mistake in the flags does not need.
    from jaxllm.engine.build import mesh_of, prepare
    from jaxllm.engine.model_source import find_model
    from jaxllm.mesh.targets import target_devices

    start = time.perf_counter()
    try:
        count = engine.data_parallel_size * engine.tensor_parallel_size
        devices = None if device is None else target_devices(device.lower(), count)
    except ValueError as error:
        raise InputError(f"device: {error}") from None
    mesh = mesh_of(engine, devices)
    prepared = prepare(engine, find_model(engine), mesh)
    compiler, store = prepared.compiler, prepared.compiler.store
    assert store is not None
    first, rest = prepared.plan()
    shapes = dict.fromkeys([*first, *rest])
    missing = [shape for shape in shapes if not store.holds(shape)]
    compiler.warm_up(missing, os.cpu_count() or 1)
    compiler.wait()
    kind, blocks = mesh.devices.flat[0].device_kind, prepared.memory.num_blocks
    print(
        f"{len(shapes)} programs of {engine.model} for {kind} and {blocks:,} KV blocks: {len(shapes) - len(missing)} "
        f"were there, {store.num_saved} compiled in {time.perf_counter() - start:.0f} s\n"
        f"start with --executables {engine.executables}"
    )
    if store.num_saved < len(missing):
        raise InputError(f"{len(missing) - store.num_saved} programs are missing, for the reasons above")
