"""config.json -> RopeConfig, in all spellings found in the wild. Knows keys and which scaling needs which; no formula.

Old files have `rope_theta`, `rope_scaling` and `partial_rotary_factor`; transformers 5 writes all three, and the type,
into `rope_parameters`.
"""

from collections.abc import Mapping
from typing import Any

from jaxllm.config.errors import InputError
from jaxllm.models.hf_config import head_dim, require
from jaxllm.models.rope import ORIGINAL, RopeConfig

_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor", "factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "factors": ("factors",),
}
_MAY_HAVE = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor",),
}
# Said elsewhere, or about how the model was trained.
_NOT_SCALING = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")


def rope_parameters(hf: Mapping) -> dict[str, Any]:
    """The scaling dictionary in either spelling; empty for a plain rope."""
    old, new = hf.get("rope_scaling"), hf.get("rope_parameters")
    return dict(old or new or {})


def rope_fields(hf: Mapping, partial: float | None = None) -> dict[str, Any]:
    """The fields `ropes` and `max_position` of a ModelConfig with one rope; see `rope`."""
    only = rope(hf, head_dim(hf), partial=partial)
    return {"ropes": (only,), "max_position": max_position(hf, only)}


def rope(
    hf: Mapping,
    size: int,
    *,
    theta_key: str = "rope_theta",
    scaling: Mapping | None = None,
    partial: float | None = None,
) -> RopeConfig:
    """The rope of heads of a size, from config.json, or from `scaling` where a model has several.

    `partial` is the share of each head that turns if config.json does not say; None where the family turns all of it.

    Raises:
        InputError: the scaling's type is not supported, lacks one of its numbers or has one that is not known.
    """
    options = {k: v for k, v in (rope_parameters(hf) if scaling is None else scaling).items() if v is not None}
    kind = options.get("rope_type") or options.get("type") or "default"
    if kind not in _NEEDS:
        raise InputError(f"config.json: rope scaling {kind!r} is not supported; supported are {', '.join(_NEEDS)}")
    theta = float(options.get("rope_theta") or hf.get(theta_key) or 10000.0)
    dim = _turned(hf, options, size, partial)
    known = {k: v for k, v in options.items() if k not in _NOT_SCALING}
    _complete(hf, kind, known)
    missing = [name for name in _NEEDS[kind] if known.get(name) is None]
    if missing:
        raise InputError(f"config.json: rope scaling {kind!r} lacks {', '.join(missing)}")
    if unknown := sorted(known.keys() - {*_NEEDS[kind], *_MAY_HAVE.get(kind, ()), ORIGINAL}):
        raise InputError(f"config.json: rope scaling {kind!r} with {unknown[0]}={known[unknown[0]]!r} is not supported")
    _check_lengths(known, dim)
    if kind == "default":
        return RopeConfig(theta, dim)
    frozen = {"rope_type": kind} | {k: tuple(v) if isinstance(v, list) else v for k, v in known.items()}
    return RopeConfig(theta, dim, tuple(sorted(frozen.items())))


def max_position(hf: Mapping, rope: RopeConfig) -> int:
    """The longest context: yarn and dynamic scaling reach beyond what the model was first trained for."""
    options, length = dict(rope.scaling), int(require(hf, "max_position_embeddings"))
    if rope.kind in ("yarn", "dynamic"):
        return max(length, int(options["factor"] * options[ORIGINAL]))
    return length


def _turned(hf: Mapping, options: Mapping[str, Any], size: int, partial: float | None) -> int:
    share = options.get("partial_rotary_factor")
    share = hf.get("partial_rotary_factor") if share is None else share
    if partial is None and share not in (None, 1.0):
        raise InputError(f"config.json: partial_rotary_factor={share} is not supported for this architecture (only 1)")
    share = (1.0 if partial is None else partial) if share is None else share
    return int(size * share)


def _complete(hf: Mapping, kind: str, options: dict[str, Any]) -> None:
    """Fills in what transformers takes from the keys around the dictionary."""
    if kind == "dynamic":
        options[ORIGINAL] = hf.get("max_position_embeddings")
    if kind in ("yarn", "longrope"):
        original = hf.get(ORIGINAL) or options.get(ORIGINAL) or hf.get("max_position_embeddings")
        if not original:
            raise InputError(f"config.json: rope scaling {kind!r} lacks {ORIGINAL}")
        options[ORIGINAL] = original
        if options.get("factor") is None and hf.get("max_position_embeddings"):
            options["factor"] = hf["max_position_embeddings"] / original


def _check_lengths(options: Mapping[str, Any], dim: int) -> None:
    for name in ("short_factor", "long_factor", "factors"):
        if name in options and len(options[name]) != dim // 2:
            raise InputError(
                f"config.json: rope scaling's {name} has {len(options[name])} numbers, {dim // 2} frequencies need "
                "one each"
            )
