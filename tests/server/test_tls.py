import ssl
from pathlib import Path

import pytest

from jaxllm.config.errors import InputError
from jaxllm.config.server_args import ServerArgs
from jaxllm.server.tls import tls_settings


def test_without_a_certificate_there_is_no_https():
    assert tls_settings(ServerArgs()) == {}


def test_a_certificate_with_its_key_is_taken(certificate: tuple[str, str]):
    cert, key = certificate
    settings = tls_settings(ServerArgs(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert, ssl_cert_reqs=2))
    assert settings["ssl_cert_reqs"] == ssl.CERT_REQUIRED
    assert "ssl_ciphers" not in settings


def test_what_is_no_certificate_is_told_before_a_model_is_loaded(certificate: tuple[str, str], tmp_path: Path):
    cert, key = certificate
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(InputError, match=r"ssl_certfile='.*nowhere' is no file"):
        tls_settings(ServerArgs(ssl_certfile=str(tmp_path / "nowhere")))
    for args in (
        ServerArgs(ssl_certfile=str(tmp_path / "text"), ssl_keyfile=key),
        ServerArgs(ssl_certfile=cert, ssl_keyfile=str(tmp_path / "text")),
        ServerArgs(ssl_certfile=cert, ssl_keyfile=key, ssl_ciphers="NO-SUCH"),
    ):
        with pytest.raises(InputError, match="HTTPS cannot be set up with ssl_certfile="):
            tls_settings(args)
