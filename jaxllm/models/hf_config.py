"""Reads config.json fields that many families share. Knows Hugging Face's spellings; families know what they mean."""

from collections.abc import Mapping

from jaxllm.config.errors import InputError
from jaxllm.models.config import ROPE_TYPES, RopeConfig

_SCALING_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "factors": ("factors",),
}


def require(hf: Mapping, key: str):
    """Gives hf[key].

    Raises:
        InputError: config.json lacks it.
    """
    if hf.get(key) is None:
        raise InputError(
            f"config.json lacks {key!r}, which {'/'.join(hf.get('architectures') or ['this model'])} needs"
        )
    return hf[key]


def refuse(hf: Mapping, **expected: object) -> None:
    """Refuses a field that would change the result and is not built, unless it has the expected value or is absent."""
    for key, value in expected.items():
        if hf.get(key) is not None and hf[key] != value:
            raise InputError(f"config.json: {key}={hf[key]!r} is not supported for this architecture (only {value!r})")


def head_dim(hf: Mapping) -> int:
    """The head size, given or derived."""
    return int(hf.get("head_dim") or require(hf, "hidden_size") // require(hf, "num_attention_heads"))


def dtype_name(hf: Mapping) -> str:
    """The checkpoint's own dtype."""
    return str(hf.get("torch_dtype") or hf.get("dtype") or "float32")


def token_ids(value: object) -> tuple[int, ...]:
    """eos_token_id as config.json writes it: a number, a list or nothing."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)  # pyright: ignore[reportArgumentType]


def rope(hf: Mapping, dim: int, *, theta_key: str = "rope_theta", scaling: Mapping | None = None) -> RopeConfig:
    """A rope from `rope_theta` and a scaling dictionary, or from transformers 5's `rope_parameters`.

    Raises:
        InputError: the scaling's type is not supported, or lacks one of its numbers.
    """
    options = dict(scaling or {})
    kind = options.get("rope_type") or options.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise InputError(f"config.json: rope scaling {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    missing = [name for name in _SCALING_NEEDS.get(kind, ()) if options.get(name) is None]
    if missing:
        raise InputError(f"config.json: rope scaling {kind!r} lacks {', '.join(missing)}")
    theta = float(options.pop("rope_theta", None) or hf.get(theta_key) or 10000.0)
    options = {"rope_type": kind} | {k: v for k, v in options.items() if k not in ("rope_type", "type")}
    frozen = tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in options.items()))
    return RopeConfig(theta, dim, () if kind == "default" else frozen)
