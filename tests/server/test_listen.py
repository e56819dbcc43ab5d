import errno
import socket
from pathlib import Path

import pytest

from jaxllm.config.errors import InputError
from jaxllm.server.listen import address_error, bind_socket, bind_unix_socket


def test_a_port_in_use_is_refused_by_name():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 is in use; .*--port"):
            bind_socket("127.0.0.1", port)


def test_clients_are_refused_until_the_socket_listens():
    with bind_socket("127.0.0.1", 0) as bound:
        address = bound.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        bound.listen()
        socket.create_connection(address, timeout=5).close()


def test_an_address_that_is_not_this_machines_is_refused_by_name():
    with pytest.raises(InputError, match=r"cannot listen on --host 192\.0\.2\.1 --port 0: "):
        bind_socket("192.0.2.1", 0)
    with pytest.raises(InputError, match="--host no such host"):
        bind_socket("no such host", 0)


def test_a_port_that_needs_rights_is_told_so():
    error = address_error("127.0.0.1", 80, OSError(errno.EACCES, "Permission denied"))
    assert "may not listen on port 80" in str(error)


def test_a_unix_socket_replaces_one_that_nobody_listens_on_and_nothing_else(tmp_path: Path):
    path = str(tmp_path / "s")
    first = bind_unix_socket(path)
    first.listen()
    with pytest.raises(InputError, match="is in use"):
        bind_unix_socket(path)
    first.close()
    bind_unix_socket(path).close()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError, match="is in use"):
        bind_unix_socket(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "kept"
    with pytest.raises(InputError, match="cannot listen on uds"):
        bind_unix_socket(str(tmp_path / "no" / "s"))
