"""How log lines look and where they go. Knows records of logging; no request."""

import json
import logging
import logging.config
import sys
import time
from pathlib import Path

from jaxllm.config.errors import InputError
from jaxllm.config.server_args import ServerArgs

_ACCESS_PATH = 2  # its place among the arguments of uvicorn's access line: client, method, path, version, status


def set_up_logging(args: ServerArgs) -> None:
    """Sends log lines to stderr, so that stdout has only what is meant for the terminal.

    Raises:
        InputError: the file that configures logging instead cannot be read, or does not.
    """
    if args.log_config_file is None:
        _log_to_stderr(args)
    else:
        _configure(args.log_config_file)
    if args.disable_access_log_for_endpoints:
        silent = frozenset(path.strip() for path in args.disable_access_log_for_endpoints.split(","))
        logging.getLogger("uvicorn.access").addFilter(lambda record: accessed_path(record) not in silent)


def _configure(path: str) -> None:
    try:
        logging.config.dictConfig(json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise InputError(f"log_config_file={path!r} cannot configure logging: {error}") from None


def _log_to_stderr(args: ServerArgs) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter()
        if args.log_format == "json"
        else logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in ("httpx", "jax"):
        logging.getLogger(name).setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


def accessed_path(record: logging.LogRecord) -> str | None:
    """Gives the path of an access line, without its query; None for any other line."""
    if isinstance(record.args, tuple) and len(record.args) > _ACCESS_PATH:
        return str(record.args[_ACCESS_PATH]).partition("?")[0]
    return None
