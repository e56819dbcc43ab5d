"""The certificate of a server, looked at before a model is loaded. Knows files and ssl; no HTTP."""

import ssl
from pathlib import Path
from typing import Any

from jaxllm.config.errors import InputError
from jaxllm.config.server_args import ServerArgs


def tls_settings(args: ServerArgs) -> dict[str, Any]:
    """Gives uvicorn's settings for HTTPS; none without a certificate.

    Raises:
        InputError: a file that is missing or does not hold what it should.
    """
    if args.ssl_certfile is None:
        return {}
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(args, name)
        if path is not None and not Path(path).is_file():
            raise InputError(f"{name}={path!r} is no file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        if args.ssl_ca_certs is not None:
            context.load_verify_locations(args.ssl_ca_certs)
        if args.ssl_ciphers is not None:
            context.set_ciphers(args.ssl_ciphers)
    except (ssl.SSLError, OSError) as error:
        raise InputError(
            f"HTTPS cannot be set up with ssl_certfile={args.ssl_certfile!r}, ssl_keyfile={args.ssl_keyfile!r}: {error}"
        ) from None
    settings = {
        "ssl_certfile": args.ssl_certfile,
        "ssl_keyfile": args.ssl_keyfile,
        "ssl_ca_certs": args.ssl_ca_certs,
        "ssl_cert_reqs": args.ssl_cert_reqs,
    }
    return settings if args.ssl_ciphers is None else {**settings, "ssl_ciphers": args.ssl_ciphers}
