"""A model's configuration -> the plain numbers that the planner takes. Reads config.json only; knows no device.

What a rank holds is counted from the decoder's own parameters and the engine's own arithmetic, so that a plan's bytes
are those of a start.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxllm.config.engine_args import DTYPES, KV_CACHE_DTYPES
from jaxllm.config.errors import InputError
from jaxllm.engine.memory import block_bytes, temporaries_bound
from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.cost_model import ModelShape, Shard
from jaxllm.models.checkpoint.packaged_models import PACKAGED_MODELS
from jaxllm.models.checkpoint.resolve import open_checkpoint
from jaxllm.models.checkpoint.safetensors_folder import read_json_object
from jaxllm.models.config import ModelConfig
from jaxllm.models.forward import build_program
from jaxllm.models.read_config import read_config
from jaxllm.models.registry import find_family
from jaxllm.models.shapes import find_shape, shape_names


def find_config(model: str) -> dict[str, Any]:
    """Finds a model's config.json: a packaged model, a known shape, a folder, the file itself, or of the hub.

    Of a hub id nothing else is downloaded.

    Raises:
        InputError: nothing of that name is found.
    """
    path = Path(model).expanduser()
    if model in PACKAGED_MODELS:
        return open_checkpoint(model).config
    if path.suffix == ".json" and path.is_file():
        return read_json_object(path)
    if (path / "config.json").is_file():
        return read_json_object(path / "config.json")
    if path.exists():
        return open_checkpoint(model).config
    if (known := find_shape(model)) is not None:
        return known
    if "/" in model and not model.startswith((".", "/", "~")) and model.count("/") == 1:
        return _from_hub(model)
    raise InputError(
        f"model={model!r} is neither a folder nor a file here, nor a hub id (org/name), nor one of "
        f"{', '.join([*PACKAGED_MODELS, *shape_names()])}"
    )


def read_model(model: str, dtype: str = "auto", overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Reads a model's configuration for a GPU: `auto` is the checkpoint's 16-bit type, or bfloat16.

    Raises:
        InputError: the model is not found or not supported, or the type is unknown.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    config = {**find_config(model), **(overrides or {})}
    cfg = read_config(find_family(config)[1], config)
    automatic = "float16" if cfg.dtype == "float16" else "bfloat16"
    return replace(cfg, dtype=automatic if DTYPES[dtype] == "auto" else DTYPES[dtype])


def shape_of(
    cfg: ModelConfig,
    name: str,
    tensors: Iterable[int] = (1,),
    kv_cache_dtype: str = "auto",
) -> ModelShape:
    """Counts what a rank holds for each number of tensor ranks.

    Raises:
        InputError: the type of the KV cache is unknown.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise InputError(f"kv_cache_dtype={kv_cache_dtype!r} is not known; choose one of {', '.join(KV_CACHE_DTYPES)}")
    kv_dtype = KV_CACHE_DTYPES[kv_cache_dtype]
    kv_itemsize = jnp.dtype(cfg.dtype if kv_dtype == "auto" else kv_dtype).itemsize
    shards, refused = {}, {}
    for tensor in tensors:
        try:
            shards[tensor] = _shard(cfg, tensor, kv_itemsize)
        except InputError as error:
            refused[tensor] = str(error)
    return ModelShape(
        name=name,
        num_layers=cfg.num_layers,
        d_model=cfg.d_model,
        head_dim=cfg.head_dim,
        vocab_size=cfg.vocab_size,
        max_position=cfg.max_position,
        gated_mlp=cfg.gated_mlp,
        sums_per_layer=1 if cfg.parallel_mlp else 2,
        tied=cfg.tie_embeddings,
        itemsize=jnp.dtype(cfg.dtype).itemsize,
        kv_itemsize=kv_itemsize,
        windows=tuple(kind.window for kind in cfg.layer_kinds),
        group_windows=cfg.kv_layout.windows,
        shards=shards,
        refused=refused,
    )


def _shard(cfg: ModelConfig, tensor: int, kv_itemsize: int) -> Shard:
    split, rules = cfg.split(tensor), AxisRules()
    one_layer = replace(split, layer_kinds=split.layer_kinds[:1])  # the others are as large
    sizes = {"embedding": 0, "layers": 0, "head": 0}
    itemsize = jnp.dtype(cfg.dtype).itemsize
    for param in build_program(one_layer).params:
        axes = rules.spec(*param.axes)
        shape = [size // tensor if axis == "tensor" else size for size, axis in zip(param.shape, axes, strict=True)]
        sizes[str(param.path[0])] += math.prod(shape) * itemsize
    always = temporaries_bound(split, 0, 0, tensor)
    return Shard(
        num_q_heads=split.num_q_heads // tensor,
        num_kv_heads=split.num_kv_heads // tensor,
        d_ff=cfg.d_ff // tensor,
        vocab_rows=split.vocab_rows // tensor,
        layer_bytes=sizes["layers"],
        embedding_bytes=sizes["embedding"],
        head_bytes=sizes["head"],
        kv_slot_bytes=block_bytes(split, 1, kv_itemsize, tensor),
        temporary_bytes=(
            temporaries_bound(split, 1, 0, tensor) - always,
            temporaries_bound(split, 0, 1, tensor) - always,
            always,
        ),
    )


def _from_hub(repo: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download

    try:
        return read_json_object(Path(hf_hub_download(repo, "config.json")))
    except InputError:
        raise
    except Exception as error:  # the client raises some twenty types without a common ancestor
        said = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"the hub did not give config.json of {repo}: {said}") from None
