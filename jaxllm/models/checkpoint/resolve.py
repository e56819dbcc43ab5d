"""Turns what a user calls a model into an open checkpoint. Knows the order of the places, and no format."""

import os
import re
from pathlib import Path

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.file_bytes import open_error
from jaxllm.models.checkpoint.gguf_file import GGUFFile
from jaxllm.models.checkpoint.hub import download
from jaxllm.models.checkpoint.orbax_folder import OrbaxFolder, is_orbax_folder
from jaxllm.models.checkpoint.packaged_models import PACKAGED_MODELS, locate_packaged
from jaxllm.models.checkpoint.safetensors_folder import SafetensorsFolder
from jaxllm.models.checkpoint.source import Checkpoint

DEFAULT_MODEL = "smollm2"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def open_checkpoint(
    model: str, revision: str | None = None, download_dir: str | None = None, hf_token: str | None = None
) -> Checkpoint:
    """Opens a packaged model (smollm2, gemma3-270m), a local folder or .gguf file, or a hub id, in this order.

    A folder named like a packaged model is reached as ./smollm2. Only a hub id has revisions.

    Raises:
        InputError: nothing of that name is found, or it cannot be read.
    """
    if model in PACKAGED_MODELS:
        _refuse_revision(model, revision, "a packaged model")
        return GGUFFile(locate_packaged(model))
    path = Path(os.path.expanduser(model))
    try:
        is_folder, is_file = model != "" and path.is_dir(), path.is_file()
    except OSError as error:
        raise open_error(path, error) from None
    if is_folder:
        _refuse_revision(model, revision, "a local folder")
        return _open_folder(path)
    if is_file:
        _refuse_revision(model, revision, "a local file")
        return _open_file(path)
    if not _HUB_ID.fullmatch(model) or model.startswith(".") or model.endswith(".gguf"):
        raise InputError(
            f"{model!r} is neither a folder nor a file here, nor a hub id (org/name), "
            f"nor one of {', '.join(PACKAGED_MODELS)}"
        )
    return SafetensorsFolder(download(model, revision, download_dir, hf_token))


def default_served_name(model: str) -> str:
    """Gives the name clients call the model by when the user chose none: as in vLLM, what the user called it."""
    return model


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / "config.json").exists():
        return OrbaxFolder(folder) if is_orbax_folder(folder) else SafetensorsFolder(folder)
    gguf = sorted(folder.glob("*.gguf"))
    if len(gguf) > 1:
        raise InputError(f"{folder} holds {len(gguf)} GGUF files and no config.json: name one, such as {gguf[0]}")
    return GGUFFile(gguf[0]) if gguf else SafetensorsFolder(folder)


def _open_file(path: Path) -> Checkpoint:
    if path.name == "config.json" or path.suffix == ".safetensors":
        raise InputError(f"{path} is one file of a model: name its folder, {path.parent}")
    return GGUFFile(path)


def _refuse_revision(model: str, revision: str | None, what: str) -> None:
    if revision is not None:
        raise InputError(f"revision {revision} of {model}: only a model of the hub has revisions, this is {what}")
