import json
import logging
from pathlib import Path

import pytest

from jaxllm.config.errors import InputError
from jaxllm.config.server_args import ServerArgs
from jaxllm.server.logs import JsonFormatter, accessed_path, set_up_logging


def record(message: str, *args: object, name: str = "jaxllm.x") -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, "file.py", 1, message, args, None)


def test_a_json_line_is_one_object_whatever_the_message_has_in_it():
    line = JsonFormatter().format(record('two\nlines and a "%s"', "é"))
    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["logger"], told["message"]) == ("warning", "jaxllm.x", 'two\nlines and a "é"')
    assert told["time"].endswith("Z")


def test_a_traceback_goes_into_its_object():
    try:
        raise ValueError("why")
    except ValueError as error:
        failed = record("failed")
        failed.exc_info = (type(error), error, error.__traceback__)
    told = json.loads(JsonFormatter().format(failed))
    assert "ValueError: why" in told["exception"]


def test_access_lines_of_some_paths_are_left_out():
    logger = logging.getLogger("uvicorn.access")
    before = list(logger.filters)
    try:
        set_up_logging(ServerArgs(disable_access_log_for_endpoints="/health, /metrics"))
        line = '%s - "%s %s HTTP/%s" %d'
        access = [record(line, "1.2.3.4:5", "GET", path, "1.1", 200) for path in ("/health?x=1", "/v1/models")]
        assert accessed_path(access[0]) == "/health"
        assert [bool(logger.filter(each)) for each in access] == [False, True]
        assert logger.filter(record("anything else"))
    finally:
        logger.filters = before


def test_a_file_may_configure_logging_and_one_that_cannot_is_told(tmp_path: Path):
    file = tmp_path / "logging.json"
    name = "jaxllm.tests.configured"
    told = {"version": 1, "disable_existing_loggers": False, "loggers": {name: {"level": "ERROR"}}}
    file.write_text(json.dumps(told))
    set_up_logging(ServerArgs(log_config_file=str(file)))
    assert logging.getLogger(name).level == logging.ERROR
    for content in ("{", "[]", "{}", '{"version": 1, "handlers": {"x": {"class": "no.such.Handler"}}}'):
        file.write_text(content)
        with pytest.raises(InputError, match=r"log_config_file='.*' cannot configure logging: "):
            set_up_logging(ServerArgs(log_config_file=str(file)))
    with pytest.raises(InputError, match="No such file"):
        set_up_logging(ServerArgs(log_config_file=str(tmp_path / "none")))
