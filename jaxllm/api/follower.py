"""The processes of an engine other than the first: each runs its part of every step. Knows no requests and no HTTP."""

import gc
import logging
import threading
from os import PathLike, fspath
from typing import Any

from jaxllm.config.engine_args import EngineArgs, engine_args
from jaxllm.config.errors import InputError
from jaxllm.engine.build import StartTimes, build_runner
from jaxllm.engine.model_source import find_model
from jaxllm.engine.processes.group import ProcessGroup
from jaxllm.engine.processes.replay import replay
from jaxllm.mesh.caller import without_callers_mesh

logger = logging.getLogger(__name__)


def run_follower(model: str | PathLike[str] = "smollm2", **options: Any) -> None:
    """Takes part in the engine of an LLM or AsyncLLM in process 0, with the same options but for node_rank.

    Returns when that engine is closed. When a process is lost, all end: with one line on stderr and exit code 1.

    Raises:
        InputError: an option does not fit, or differs from that of process 0, in one line.
    """
    follow(engine_args({"model": fspath(model), **options}))


def follow(args: EngineArgs) -> None:
    """Does what `run_follower` does, with checked arguments."""
    if args.node_rank == 0:
        raise InputError(f"nnodes={args.nnodes}, node_rank=0: process 0 is no follower; it makes an LLM or serves")
    with without_callers_mesh():
        _follow(args)


def _follow(args: EngineArgs) -> None:
    processes, times = ProcessGroup(args), StartTimes()
    try:
        prepared, runner = build_runner(args, find_model(args), times, processes=processes)
        gc.collect()
        gc.freeze()
    except BaseException as error:
        processes.fail(error)
        raise
    is_main = threading.current_thread() is threading.main_thread()
    restore = processes.leave_on_signals() if is_main else lambda: None
    processes.wait_for_start()
    logger.info(
        "%s runs its part of each step; %s has the API",
        processes.channel.name(args.node_rank),
        processes.channel.name(0),
    )
    try:
        replay(runner, prepared.compiler, processes.channel)
        logger.info("process 0 has stopped the engine")
    finally:
        restore()
        prepared.compiler.close()
        runner.close()
        processes.stop()
