"""A YAML file of flags -> command-line arguments, to be read like those that are typed. Knows no flag's meaning."""

import difflib
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from jaxllm.config.errors import InputError


def read_config(path: str, flags: Collection[str], is_switch: Callable[[str], bool]) -> list[str]:
    """Gives the arguments that a flat mapping of flag names stands for; `is_switch` says whether a flag takes no value.

    Names may have dashes or underscores. A list gives several values, true and false turn a switch, a mapping is handed
    on as JSON, and a key without a value is as good as left out.

    Raises:
        InputError: there is no such file, it is no mapping, or it has a key that is no flag.
    """
    arguments: list[str] = []
    for key, value in _load(path).items():
        flag = "--" + str(key).replace("_", "-").removeprefix("--")
        if flag not in flags:
            near = difflib.get_close_matches(flag, flags, n=1)
            hint = f"; did you mean {near[0].removeprefix('--')!r}?" if near else ""
            raise InputError(f"{path}: unknown key {str(key)!r}{hint}")
        arguments += _spelled(path, flag, value, is_switch(flag))
    return arguments


def _load(path: str) -> dict[object, Any]:
    import yaml  # only who has such a file waits for it

    file = Path(path).expanduser()
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(f"--config={path!r} cannot be read: {cause}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise InputError(f"{path}{where}: no valid YAML: {getattr(error, 'problem', None) or error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold one mapping of flag names to values, got a {type(content).__name__}")
    return content


def _spelled(path: str, flag: str, value: Any, is_switch: bool) -> list[str]:
    if value is None:
        return []
    if is_switch:
        if not isinstance(value, bool):
            raise InputError(f"{path}: {flag[2:]} is true or false, got {value!r:.60}")
        return [flag if value else "--no-" + flag[2:]]
    if isinstance(value, bool):
        return [f"{flag}={str(value).lower()}"]
    if isinstance(value, list):
        return [f"{flag}={json.dumps([str(item) for item in value])}"]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]
