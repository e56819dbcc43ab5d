"""Takes the address to listen on. Knows sockets and the words for what can go wrong; no HTTP."""

import errno
import os
import socket
from pathlib import Path

from jaxllm.config.errors import InputError


def bind_socket(host: str, port: int) -> socket.socket:
    """Takes the address, so that a clash shows before a model is loaded. Clients are refused until it listens.

    Raises:
        InputError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise address_error(host, port, error) from None
    return bound


def bind_unix_socket(path: str) -> socket.socket:
    """Takes a path as an address; a socket that nobody listens on any more is replaced.

    Raises:
        InputError: the path cannot be had.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_left_over(path)
        bound.bind(path)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"uds={path!r} is in use: choose another path") from None
        raise InputError(f"cannot listen on uds={path!r}: {error.strerror or error}") from None
    return bound


def _remove_left_over(path: str) -> None:
    """Removes the socket of a server that is gone; leaves anything else."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:  # nobody listens
            os.unlink(path)
        except OSError:
            return


def address_error(host: str, port: int, error: OSError) -> InputError:
    """Says which flag to change."""
    if error.errno == errno.EADDRINUSE:
        return InputError(f"port {port} of {host} is in use; stop what listens there or choose another --port")
    if error.errno == errno.EACCES:
        return InputError(f"this user may not listen on port {port}; choose another --port, 1024 or above")
    return InputError(f"cannot listen on --host {host} --port {port}: {error.strerror or error}")
