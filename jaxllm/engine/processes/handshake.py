"""How the processes of one engine meet: process 0 listens, the others come, and all compare how they were started.

Knows flags as names and texts; no devices, which are not touched before all have come.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Mapping

from jaxllm.config.errors import InputError
from jaxllm.engine.processes.channel import Channel, Link
from jaxllm.engine.processes.messages import Hello, Refused, Welcome

logger = logging.getLogger(__name__)

_GREETING = 5.0  # seconds that a stranger has to say who it is
_RETRY = 0.5  # seconds


def meet(rank: int, count: int, address: str, port: int, flags: Mapping[str, str], timeout: float) -> Channel:
    """Gives the channel to the other processes when all have come and agree.

    `address` and `port` are those at which process 0 listens; `flags` are what all must have the same.

    Raises:
        InputError: a process is missing, or was started in another way than process 0, in one line.
    """
    hello = Hello(rank, count, socket.gethostname(), dict(flags))
    deadline = time.monotonic() + timeout
    return _gather(hello, address, port, deadline, timeout) if rank == 0 else _come(hello, address, port, deadline)


def _gather(own: Hello, address: str, port: int, deadline: float, timeout: float) -> Channel:
    channel = Channel(0, own.nnodes)
    channel.hosts[0] = own.host
    with listen(address, port) as listening:
        logger.info("process 0 of %d waits for the others at %s:%d", own.nnodes, address, port)
        while len(channel.peers) < own.nnodes - 1:
            left = deadline - time.monotonic()
            listening.settimeout(max(left, 0.01))
            try:
                connection, (stranger, *_) = listening.accept()
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(1, own.nnodes) if rank not in channel.peers)
                _refuse(
                    channel,
                    f"of {own.nnodes} processes these did not come within {timeout:g} s "
                    f"(distributed_timeout_seconds): {missing}; start each with its node_rank, with "
                    f"master_addr={address} and master_port={port - 1}, and let it reach ports {port - 1} and {port}",
                )
            else:
                _take(channel, Link(connection), stranger, own)
    channel.send(Welcome(channel.hosts))
    return channel


def _take(channel: Channel, link: Link, stranger: str, own: Hello) -> None:
    link.set_timeout(_GREETING)
    try:
        hello = link.receive()
    except (OSError, ValueError):
        hello = None
    if not isinstance(hello, Hello):
        logger.warning("%s connected, but is no process of this engine", stranger)
        link.close()
        return
    wrong = differing(own, hello)
    if wrong is None and hello.rank in channel.peers:
        wrong = (
            f"two processes have node_rank={hello.rank}, on the hosts {channel.hosts[hello.rank]} and {hello.host}: "
            f"give each its own, from 0 to {own.nnodes - 1}"
        )
    if wrong is not None:
        with contextlib.suppress(OSError):
            link.send(Refused(wrong))
        _refuse(channel, wrong)
    channel.add(hello.rank, link, hello.host)


def _refuse(channel: Channel, reason: str) -> None:
    channel.expect_end()
    channel.send(Refused(reason))
    raise InputError(reason)


def _come(own: Hello, address: str, port: int, deadline: float) -> Channel:
    link = _connect(own, address, port, deadline)
    channel = Channel(own.rank, own.nnodes)
    channel.hosts[own.rank] = own.host
    link.send(own)
    channel.add(0, link, address)
    try:
        # Process 0 began to wait earlier or later than this one; it is the one to tell who is missing.
        answer = channel.receive(0, max(deadline - time.monotonic(), 0) + _GREETING)
    except TimeoutError as error:
        raise InputError(f"{error}: see what it says, and whether all processes were started") from None
    if isinstance(answer, Refused):
        channel.expect_end()
        raise InputError(answer.reason)
    assert isinstance(answer, Welcome)
    channel.hosts[:] = answer.hosts
    return channel


def _connect(own: Hello, address: str, port: int, deadline: float) -> Link:
    is_told = False
    while True:
        try:
            return Link(socket.create_connection((address, port), max(min(deadline - time.monotonic(), 10), 0.1)))
        except OSError as error:
            if time.monotonic() + _RETRY > deadline:
                raise InputError(
                    f"process {own.rank} of {own.nnodes} cannot reach process 0 at {address}:{port} "
                    f"({error.strerror or error}): see whether it runs there, with master_port={port - 1}, and whether "
                    "a firewall is between"
                ) from None
        if not is_told:
            logger.info("process %d of %d waits for process 0 at %s:%d", own.rank, own.nnodes, address, port)
            is_told = True
        time.sleep(_RETRY)


def differing(own: Hello, other: Hello) -> str | None:
    """Says in what another process was started differently from process 0, if it was."""
    if other.nnodes != own.nnodes:
        return f"process {other.rank} on {other.host} has nnodes={other.nnodes}, process 0 has nnodes={own.nnodes}"
    return differing_facts(own.flags, other.flags, f"process {other.rank} on {other.host}")


def differing_facts(own: Mapping[str, str], others: Mapping[str, str], who: str) -> str | None:
    """Says in what facts differ from those of process 0, if they do."""
    names = [name for name in {**own, **others} if own.get(name) != others.get(name)]
    if not names:
        return None
    shown = ", ".join(f"{name}={others.get(name)!s:.60}" for name in names[:3])
    here = ", ".join(f"{name}={own.get(name)!s:.60}" for name in names[:3])
    return f"{who} has {shown}, process 0 has {here}: start all processes with the same"


def listen(address: str, port: int) -> socket.socket:
    """Listens at an address of this host, or everywhere where it is another's (one that is translated).

    Raises:
        InputError: the port is taken, or the name unknown.
    """
    where = f"master_addr={address}, master_port={port - 1}"
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InputError(f"{where}: {address!r} is not known here ({error.strerror or error})") from None
    try:
        return socket.create_server((place[0], port), family=family, backlog=128)
    except OSError:
        pass
    try:
        return socket.create_server(("", port), backlog=128)
    except OSError as error:
        raise InputError(
            f"{where}: process 0 cannot listen on port {port}, the one after master_port: {error.strerror or error}; "
            "give all processes another master_port"
        ) from None
