"""The processes of one engine, from their first word to their last. Knows flags and facts; no steps."""

import atexit
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import jax

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.engine.processes.handshake import differing_facts, meet
from jaxllm.engine.processes.leader import CompiledElsewhere
from jaxllm.engine.processes.messages import Agreed, Facts, Leaving, Started, Stop
from jaxllm.engine.processes.replay import TellCompiled, describe_failure
from jaxllm.mesh.processes import join_devices, leave_devices

logger = logging.getLogger(__name__)

START_TIMEOUT = 300  # seconds
_FAILED, _MISUSED = 1, 2  # exit codes
# What may differ: it concerns the host, or only process 0, which alone has requests.
_OF_THE_HOST = frozenset(
    (
        *("node_rank", "hf_token", "download_dir", "use_tqdm_on_load", "executables", "disable_log_stats"),
        *("tokenizer", "skip_tokenizer_init", "chat_template", "step_timeout", "scheduling_policy"),
    )
)


class ProcessGroup:
    """All processes of an engine, as one of them sees it."""

    def __init__(self, args: EngineArgs):
        """Waits until all have come, compares how they were started, and joins their devices.

        Raises:
            InputError: they do not come, do not agree, or have too few or too many devices; in one line.
        """
        assert args.master_addr is not None
        timeout = args.distributed_timeout_seconds or START_TIMEOUT
        rank, count, address, port = args.node_rank, args.nnodes, args.master_addr, args.master_port
        self.rank = rank
        self._joined = self._ended = self._failed = False
        self._exit_code = _FAILED
        self.channel = meet(rank, count, address, port + 1, common_flags(args), timeout)
        self.elsewhere = CompiledElsewhere(self.channel) if rank == 0 else TellCompiled(self.channel)
        self.channel.on(Leaving, self._stop_because)
        atexit.register(self._at_exit)  # after jax's own, so that it comes before that
        try:
            self._joined = join_devices(rank, count, address, port, timeout)
            found = jax.device_count()  # each process has to ask: they tell each other what they have
        except (ValueError, OSError, RuntimeError) as error:
            lines = str(error).strip().splitlines() or ["no message"]
            raise self.fail(InputError(f"master_addr={address}, master_port={port}: {lines[0]}")) from None
        self._check_devices(args, found)
        logger.info(
            "process %d of %d: %d of %d devices are here", rank, count, jax.local_device_count(), jax.device_count()
        )

    def agree(self, facts: Mapping[str, str], num_blocks: int) -> int:
        """Compares what the programs depend on; gives the least number of blocks that a process has room for.

        Raises:
            InputError: they do not agree.
        """
        facts = comparable(facts)
        channel = self.channel
        if self.rank > 0:
            channel.send(Facts(facts, num_blocks))
            answer = channel.receive(0)
            assert isinstance(answer, Agreed)
            return answer.num_blocks
        for rank in channel.peers:
            theirs = channel.receive(rank)
            assert isinstance(theirs, Facts)
            wrong = differing_facts(facts, theirs.facts, channel.name(rank))
            if wrong is not None:
                raise self._refuse(wrong)
            num_blocks = min(num_blocks, theirs.num_blocks)
        channel.send(Agreed(num_blocks))
        return num_blocks

    def wait_for_start(self) -> None:
        """Waits until every other process can run steps; called by one of those, tells that it can."""
        if self.rank > 0:
            self.channel.send(Started())
            return
        for rank in self.channel.peers:
            assert isinstance(self.channel.receive(rank), Started)

    def on_loss(self, tell: Callable[[str], None]) -> None:
        """Has a function called with the reason shortly before the process ends for the loss of another."""
        self.channel.on_loss(tell)

    def fail[E: BaseException](self, error: E) -> E:
        """Ends the other processes, since this one raises an error, which is given back."""
        code = _MISUSED if isinstance(error, InputError) else _FAILED
        self._end_others(describe_failure(self.channel, error), code)
        return error

    def stop(self) -> None:
        """Ends all processes in order; called by another than process 0, ends this one's part."""
        if self._ended:
            return
        self._ended = True
        self.channel.expect_end()
        if self.rank == 0:
            self.channel.send(Stop())
        if self._joined:
            leave_devices()
        self.channel.close()

    def leave_on_signals(self) -> Callable[[], None]:
        """Has SIGTERM and SIGINT ask process 0 to stop all; a second one ends this process. Gives what undoes it."""

        def ask(number: int, frame: object) -> None:
            if self.channel.is_leaving:
                os._exit(128 + number)
            self.channel.is_leaving = True
            self.channel.send_soon(Leaving())

        handlers = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}

        def restore() -> None:
            for number, handler in handlers.items():
                signal.signal(number, handler)

        return restore

    def _check_devices(self, args: EngineArgs, found: int) -> None:
        """All see the same; process 0 says it, or some would take another's end for a loss."""
        wanted = args.data_parallel_size * args.tensor_parallel_size
        if self.rank == 0 and wanted != found:
            raise self._refuse(
                f"data_parallel_size={args.data_parallel_size} x tensor_parallel_size={args.tensor_parallel_size} is a "
                f"mesh of {wanted} device(s), but the {args.nnodes} processes have {found} together: change one of the "
                "sizes, or the devices that each process sees (CUDA_VISIBLE_DEVICES)"
            )

    def _refuse(self, reason: str) -> InputError:
        """Ends the other processes for what concerns them all."""
        self._end_others(reason, _MISUSED)
        return InputError(reason)

    def _end_others(self, line: str, exit_code: int) -> None:
        if not self._ended:
            self._ended = self._failed = True
            self._exit_code = exit_code
            self.channel.tell_end(line)

    def _stop_because(self, rank: int, message: object) -> None:
        logger.info("%s was told to stop, so all stop", self.channel.name(rank))
        os.kill(os.getpid(), signal.SIGTERM)

    def _at_exit(self) -> None:
        if self._failed and self._joined:  # jax would wait for the others, and abort for their absence
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._exit_code)
        self.stop()


def common_flags(args: EngineArgs) -> dict[str, str]:
    """Lists what all processes must be started with: flags, and the versions that they run."""
    flags = {f.name: str(getattr(args, f.name)) for f in fields(args) if f.name not in _OF_THE_HOST}
    flags["model"] = Path(args.model).name  # the folder's name; where it lies may differ
    return {**{f"version of {name}": metadata.version(name) for name in ("jaxllm", "jax", "jaxlib")}, **flags}


def comparable(facts: Mapping[str, str]) -> dict[str, str]:
    """Leaves out of what programs depend on that which may differ between hosts."""
    found = {name: value for name, value in facts.items() if name not in ("blocks", "device")}
    found["XLA_FLAGS"] = re.sub(r"--xla_(force_host_platform_device_count|dump\w*)=\S+", "", facts["XLA_FLAGS"]).strip()
    return found
