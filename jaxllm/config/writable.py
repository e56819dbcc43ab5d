"""Refuses files that could not be written, before anything is computed for them. Writes nothing."""

from pathlib import Path

from jaxllm.config.errors import InputError


def check_writable(name: str, file: str | None) -> None:
    """Looks at the place of a file that the option `name` asks for; None asks for none.

    Raises:
        InputError: its folder does not exist, or it is a folder itself.
    """
    if file is None:
        return
    path = Path(file).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        cause = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise InputError(f"{name}={file!r} cannot be written: {cause}")
