"""What is to be run: a checkpoint that the user names, or a model that a program holds. Reads configurations only."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.engine.generation_config import choose_generation_config
from jaxllm.models.checkpoint.resolve import open_checkpoint
from jaxllm.models.checkpoint.safetensors_folder import read_json_object
from jaxllm.models.checkpoint.source import Checkpoint
from jaxllm.models.config import ModelConfig
from jaxllm.models.engine_layout import layout_pieces
from jaxllm.models.family import Family, Piece
from jaxllm.models.given import GivenModel
from jaxllm.models.registry import find_family
from jaxllm.models.shapes import find_shape

_FORMATS = {
    "gguf": "a GGUF file",
    "safetensors": "a folder of safetensors",
    "orbax": "a folder of the decoder's own arrays (orbax)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """What is to be run: config.json with its family, and the checkpoint (None for dummy weights of a known shape).

    Both configurations are with the user's changes. Or a model that the caller's program holds, with no more than that.
    """

    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    family: Family | None
    checkpoint: Checkpoint | None
    given: GivenModel | None = None


def find_model(args: EngineArgs) -> ModelSource:
    """Opens the checkpoint that the user names; for dummy weights a config.json or a known shape is enough.

    Raises:
        InputError: it is not found, is unreadable, or its architecture is not supported.
    """
    checkpoint, hf_config, generation_config = None, None, {}
    if args.load_format == "dummy":
        config_file = Path(args.model).expanduser() / "config.json"
        hf_config = read_json_object(config_file) if config_file.is_file() else find_shape(args.model)
    if hf_config is None:
        checkpoint = open_checkpoint(args.model, args.revision, args.download_dir, args.hf_token)
        hf_config, generation_config = checkpoint.config, checkpoint.generation_config
        if args.load_format not in ("auto", "dummy", checkpoint.format):
            raise InputError(f"load_format={args.load_format}, but {checkpoint.path} is {_FORMATS[checkpoint.format]}")
    hf_config = merge_overrides(hf_config, args.hf_overrides or {})
    generation_config = choose_generation_config(args, generation_config)
    _, family = find_family(hf_config)
    return ModelSource(hf_config=hf_config, generation_config=generation_config, family=family, checkpoint=checkpoint)


def take_model(args: EngineArgs, given: GivenModel) -> ModelSource:
    """Takes a model that the caller's program holds in the place of a checkpoint.

    Raises:
        InputError: an option speaks of a checkpoint.
    """
    for name in ("hf_overrides", "revision", "hf_token", "download_dir"):
        if getattr(args, name) is not None:
            raise InputError(f"{name}: a model that is handed over has no checkpoint; leave it out")
    if args.load_format != "auto":
        raise InputError(f"load_format={args.load_format}: a model that is handed over is not loaded; leave it out")
    return ModelSource(
        hf_config={},
        generation_config=choose_generation_config(args, {}),
        family=None,
        checkpoint=None,
        given=given,
    )


def merge_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Gives config with the keys of overrides; a dictionary is merged into the one that is there."""
    merged = dict(config)
    for key, value in overrides.items():
        is_nested = isinstance(value, Mapping) and isinstance(config.get(key), Mapping)
        merged[key] = merge_overrides(config[key], value) if is_nested else value
    return merged


def checkpoint_pieces(checkpoint: Checkpoint, family: Family, cfg: ModelConfig) -> Mapping[str, tuple[Piece, ...]]:
    """Says which tensors of the checkpoint make up each parameter of an unsplit decoder."""
    return layout_pieces(cfg) if checkpoint.format == "orbax" else family.pieces(cfg)
