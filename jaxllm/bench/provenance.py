"""Which command, which code: what a figure needs beside it. Knows the process and its checkout; no engine."""

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm import __version__
from jaxllm.options import as_flag


def command_line(command: str, values: Mapping[str, Any]) -> str:
    """Spells a command with the flags that were given, whether typed or read from a file."""
    words = ["jaxllm", *command.split()]
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(as_flag(name) if value else "--no-" + as_flag(name)[2:])
        elif name == "hf_token":
            words += [as_flag(name), "..."]
        elif value is not None:
            words += [as_flag(name), *map(str, value if isinstance(value, tuple) else (value,))]
    return shlex.join(words)


def commit() -> str:
    """The short hash of the checkout that runs, with a mark if it has changes; the version where there is none."""
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--match", ""],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return f"jaxllm {__version__}"
    return done.stdout.strip() or f"jaxllm {__version__}"
