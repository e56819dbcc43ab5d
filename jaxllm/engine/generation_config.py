"""What a model's authors, or the user, say about sampling where a request does not. Knows files and names, no request.

The model's generation_config.json gives the ends of a text always, and defaults of sampling unless the user takes
vLLM's own or another file's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.models.checkpoint.safetensors_folder import read_json_object

_FILE = "generation_config.json"
# Key of the file -> field of SamplingParams.
_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def choose_generation_config(args: EngineArgs, of_model: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the keys that hold: the model's own or those of the file that the user names, then the user's.

    Raises:
        InputError: there is no such file, or it is unreadable.
    """
    chosen = dict(of_model)
    if args.generation_config == "vllm":
        chosen = {key: value for key, value in chosen.items() if key not in _SAMPLING}
    elif args.generation_config != "auto":
        chosen = read_json_object(_find(args.generation_config))
    return {**chosen, **(args.override_generation_config or {})}


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the fields of SamplingParams that it speaks of.

    Raises:
        InputError: a value is out of range.
    """
    named = ((field, generation_config.get(key)) for key, field in _SAMPLING.items())
    defaults = {field: value for field, value in named if value is not None}
    try:
        SamplingParams(**defaults)
    except InputError as error:
        raise InputError(
            f"the model's {_FILE}: {error}; set generation_config='vllm' to leave it aside, "
            "or override_generation_config"
        ) from None
    return defaults


def _find(place: str) -> Path:
    path = Path(place).expanduser()
    file = path / _FILE if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"generation_config={place!r} is neither auto, vllm, a folder with {_FILE}, nor a file")
    return file
