"""Reads config.json fields that many families share. Knows Hugging Face's spellings; families know what they mean."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxllm.config.errors import InputError
from jaxllm.models.config import LayerKind

SLIDING, FULL = "sliding_attention", "full_attention"
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


class Filled(Mapping):
    """config.json with a family's defaults for the keys that it lacks. A key that is there as null stays null."""

    def __init__(self, hf: Mapping, **defaults: object):
        self._hf, self._defaults = hf, defaults

    def __getitem__(self, key: str) -> Any:
        return self._hf[key] if key in self._hf else self._defaults[key]

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self._hf), **self._defaults})

    def __len__(self) -> int:
        return sum(1 for _ in self)


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


def shared_fields(hf: Mapping, **changes: Any) -> dict[str, Any]:
    """The fields of a ModelConfig that nearly every config.json words alike: sizes, tying, dtype and special tokens.

    `changes` replace some of them or add others.
    """
    num_heads = require(hf, "num_attention_heads")
    return {
        "architecture": (hf.get("architectures") or ["unnamed"])[0],
        "vocab_size": require(hf, "vocab_size"),
        "d_model": require(hf, "hidden_size"),
        "d_ff": require(hf, "intermediate_size"),
        "num_q_heads": num_heads,
        "num_kv_heads": hf.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim(hf),
        "attention_scale": head_dim(hf) ** -0.5,
        "tie_embeddings": bool(hf.get("tie_word_embeddings")),
        "dtype": dtype_name(hf),
        "bos_token_id": hf.get("bos_token_id"),
        "eos_token_ids": token_ids(hf.get("eos_token_id")),
    } | changes


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


def activation(hf: Mapping, key: str = "hidden_act") -> str:
    """The decoder's name of an activation.

    Raises:
        InputError: it is not built.
    """
    name = require(hf, key)
    if name not in _ACTIVATIONS:
        raise InputError(f"config.json: {key}={name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def num_layers(hf: Mapping) -> int:
    """How many layers there are."""
    return int(require(hf, "num_hidden_layers"))


def layer_types(hf: Mapping, otherwise: Sequence[str]) -> list[str]:
    """The kind of each layer: listed in `layer_types`, or what the family's own rule says.

    Raises:
        InputError: the list has another length, or names a kind that is not built.
    """
    listed = hf.get("layer_types")
    if not listed:
        return list(otherwise)
    if len(listed) != len(otherwise) or set(listed) - {SLIDING, FULL}:
        raise InputError(
            f"config.json: layer_types must name {len(otherwise)} layers as {SLIDING} or {FULL}, got {listed}"
        )
    return list(listed)


def every_nth_full(count: int, n: int) -> list[str]:
    """Layers of which every n-th sees all, and the others a window."""
    return [SLIDING if (l + 1) % n else FULL for l in range(count)]


def window_kinds(types: Sequence[str], window: int | None) -> tuple[LayerKind, ...]:
    """Layers that differ by their window only."""
    return tuple(LayerKind(window if kind == SLIDING else None) for kind in types)
