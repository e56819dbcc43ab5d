"""A port of this process that leads to another host's, and stays open when that host is gone. Knows bytes only.

jax's client of a coordinator aborts the process, with a C++ log, the moment the coordinator's connection closes. Behind
a line that is held it learns of the loss by its heartbeats, and whoever watches the other processes can speak first.
"""

import contextlib
import socket
import threading
import time

_RETRY = 0.2  # seconds
_CHUNK = 1 << 16


def hold_line(address: str, port: int, timeout: float) -> int:
    """Gives a port of 127.0.0.1 whose connections lead to the address, tried again for so many seconds."""
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listening, address, port, timeout), daemon=True, name="jaxllm-line").start()
    return listening.getsockname()[1]


def _accept(listening: socket.socket, address: str, port: int, timeout: float) -> None:
    while True:
        near, _ = listening.accept()
        threading.Thread(target=_connect, args=(near, address, port, timeout), daemon=True, name="jaxllm-line").start()


def _connect(near: socket.socket, address: str, port: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            far = socket.create_connection((address, port), timeout=10)
            break
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(_RETRY)
    for connection in (near, far):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=_send, args=(near, far), daemon=True, name="jaxllm-line").start()
    _bring(near, far)


def _send(near: socket.socket, far: socket.socket) -> None:
    """Carries what this process says; to a far end that is gone it goes nowhere."""
    with contextlib.suppress(OSError):
        while content := near.recv(_CHUNK):
            with contextlib.suppress(OSError):
                far.sendall(content)
    near.close()
    far.close()


def _bring(near: socket.socket, far: socket.socket) -> None:
    """Carries what comes from there; its end is not carried on."""
    with contextlib.suppress(OSError):
        while content := far.recv(_CHUNK):
            near.sendall(content)
