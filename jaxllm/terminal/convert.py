"""`jaxllm convert`: writes a model as the engine keeps it, so that it opens without the original. Runs no model."""

import dataclasses
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.config.engine_args import DTYPES, HIDDEN, EngineArgs, engine_args, flag
from jaxllm.config.errors import InputError
from jaxllm.options import OptionParser, add_hidden_options, add_model_argument, add_options, with_model

_ENGINE_FLAGS = ("model", "revision", "download_dir", "hf_token", "load_format", "dtype", "use_tqdm_on_load")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tekken.json", "tiktoken.model", "*.jinja"),
    "additional_chat_templates/*.jinja",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertArgs:
    """Flags of `convert`."""

    output: str | None = flag(None, "folder to write the model to")
    overwrite: bool = flag(False, "replace the model that the folder holds")


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags, and those of the engine that say which weights are read and in which type."""
    add_model_argument(parser)
    add_options(parser, ConvertArgs, "convert")
    others = [field.name for field in dataclasses.fields(EngineArgs) if field.name not in _ENGINE_FLAGS]
    add_options(parser, EngineArgs, "EngineConfig", grouped=True, without=others)
    add_hidden_options(parser, HIDDEN)


def run(values: dict[str, Any]) -> int:
    """Converts the model; gives the exit code.

    Raises:
        InputError: a mistake of the user's.
    """
    given = with_model(values)
    args = ConvertArgs(output=given.pop("output", None), overwrite=given.pop("overwrite", False))
    if args.output is None:
        raise InputError("output is missing: name the folder for the converted model")
    engine = engine_args(given)
    if engine.load_format == "dummy":
        raise InputError("load_format=dummy has no weights to convert: leave it out")
    check_output(Path(args.output).expanduser(), args.overwrite)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the weights go through host memory only
    convert(engine, Path(args.output).expanduser(), args.overwrite)
    return 0


def check_output(output: Path, overwrite: bool) -> None:
    """Refuses a folder that holds something, unless it is a model that may be replaced.

    Raises:
        InputError: with what to do about it.
    """
    if output.exists() and not output.is_dir():
        raise InputError(f"output: {output} is a file: name a folder")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not overwrite:
        raise InputError(f"output: {output} is not empty: name another folder, or add --overwrite to replace the model")
    if not (output / "config.json").is_file():
        raise InputError(f"output: {output} holds no model to overwrite (no config.json): name another folder")


def convert(engine: EngineArgs, output: Path, overwrite: bool = False) -> None:
    """Reads the weights and writes them, the configurations and the tokenizer into a new folder.

    The folder gets its name when all is in it: what is interrupted leaves none that opens.

    Raises:
        InputError: see `check_output` and `find_model`, or the folder cannot be written.
    """
    check_output(output, overwrite)
    from jaxllm.engine.model_source import find_model  # seconds, which a mistake in the flags does not need
    from jaxllm.models.checkpoint.orbax_folder import write_orbax

    start, source = time.perf_counter(), find_model(engine)
    checkpoint = source.checkpoint
    assert checkpoint is not None
    if output.exists() and output.resolve() == Path(checkpoint.path).resolve():
        raise InputError(f"output: {output} is the model itself: name another folder")
    arrays = _read(engine, source)
    size = sum(array.nbytes for array in arrays.values())
    print(f"writing {len(arrays)} arrays of {size / 2**20:,.0f} MiB to {output}", file=sys.stderr, flush=True)
    with _made_at_once(output) as folder:
        write_orbax(folder, arrays, checkpoint.config, checkpoint.generation_config)
        _write_tokenizer(checkpoint, folder)
    print(
        f"{engine.model}: {len(arrays)} arrays, {size / 2**20:,.0f} MiB in {time.perf_counter() - start:.0f} s\n"
        f"start with --model {output}"
    )


def _read(engine: EngineArgs, source: Any) -> dict[str, Any]:
    """The weights on one device of this machine, unsplit and each layer's by itself, by name."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from jaxllm.engine.model_source import checkpoint_pieces
    from jaxllm.models.engine_layout import layout_arrays
    from jaxllm.models.forward import build_program
    from jaxllm.models.loader import load_weights
    from jaxllm.models.read_config import read_config

    cfg = read_config(source.family, source.hf_config)
    stored = "float32" if source.checkpoint.format == "gguf" else cfg.dtype  # what is dequantised is no 16-bit number
    dtype = jnp.dtype(stored if engine.dtype == "auto" else DTYPES[engine.dtype])
    program, device = build_program(cfg, separate=True), SingleDeviceSharding(jax.devices("cpu")[0])
    pieces = checkpoint_pieces(source.checkpoint, source.family, cfg)
    weights = load_weights(program, source.checkpoint, pieces, dtype, lambda spec: device, engine.use_tqdm_on_load)
    return layout_arrays(program.params, weights)


def _write_tokenizer(checkpoint: Any, folder: Path) -> None:
    """Copies the tokenizer's files, or writes what a GGUF file holds in their place."""
    from jaxllm.models.checkpoint.orbax_folder import TOKENIZER_FIELDS

    fields = checkpoint.tokenizer_fields()
    if fields is not None:
        (folder / TOKENIZER_FIELDS).write_text(json.dumps(fields, ensure_ascii=False))
        return
    for pattern in _TOKENIZER_FILES:
        for file in checkpoint.path.glob(pattern):
            copied = folder / file.relative_to(checkpoint.path)
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copied)


@contextmanager
def _made_at_once(output: Path) -> Iterator[Path]:
    """Gives a folder beside the one that is wanted, and puts it in its place when nothing was raised."""
    output = output.absolute()
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"cannot write {output}: {error.strerror or error}") from None
        yield partial
        if output.is_dir() and any(output.iterdir()):
            shutil.rmtree(output)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
