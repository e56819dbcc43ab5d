"""Parameters that a program holds, in whatever tree -> by name and layer, and from there into a decoder's layout.

Knows how layers may be kept; no devices, no checkpoint.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.config.errors import InputError
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.forward import DecoderProgram, ParamSpec, build_program

# {name: {layer: array}}; None stands for all layers, stacked, and for parameters that are of no layer.
Params = dict[str, dict[int | None, Any]]


@dataclass(frozen=True, slots=True)
class GivenModel:
    """A model whose arrays the caller's program holds."""

    cfg: ModelConfig
    params: Params

    @property
    def dtype(self) -> str:
        """The type of the arrays: that of the embedding."""
        held = self.params.get("embedding.tokens", {})
        return held[None].dtype.name if None in held else self.cfg.dtype

    def build_program(self, cfg: ModelConfig) -> DecoderProgram:
        """Gives the decoder in the layout of the arrays, so that they can be used as they are."""
        is_stacked = {None in held for name, held in self.params.items() if name.startswith("layers.")}
        return build_program(cfg, separate=is_stacked == {True, False}, by_layer=is_stacked == {False})


class Arranged(NamedTuple):
    """Arrays in the order of a program's parameters, and which of them had to be made: stacked, or taken apart."""

    arrays: list[Any]
    is_new: list[bool]


def given_model(model: object) -> GivenModel:
    """Takes a Decoder, or a pair of a ModelConfig and a tree of its weights.

    Raises:
        InputError: it is neither.
    """
    if isinstance(model, Decoder):
        return GivenModel(model.cfg.unsplit(), collect(model))
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], ModelConfig):
        return GivenModel(model[0].unsplit(), collect(model[1]))
    raise InputError(
        "model must be a name, folder or file, a jaxllm.models.decoder.Decoder, or a pair (ModelConfig, weights), "
        f"got {type(model).__name__}"
    )


def collect(tree: Any) -> Params:
    """Takes an nnx module, its state, or a tree of arrays, with stacked layers or with layers by number.

    Raises:
        InputError: there is something else than arrays in it.
    """
    params: Params = {}
    _walk(tree, (), None, params)
    return params


def arrange(params: Params, program: DecoderProgram, dtype: jnp.dtype | None = None) -> Arranged:
    """Gives the arrays that a program takes; `dtype` is the only type that is taken, None takes any of floats.

    Where heads or vocabulary are laid out for tensor ranks, arrays may come laid out already, or as the model has them:
    these are left so.

    Raises:
        InputError: one is missing, is not expected, has another shape or type, or its program gave it away.
    """
    expected = {spec.name for spec in program.params}
    unknown = [name for name in params if name not in expected]
    if unknown:
        raise InputError(f"weights: {unknown[0]} is not expected")
    num_layers, arrays, is_new = program.cfg.num_layers, [], []
    own_shapes = shapes_of_model(program.cfg)
    for spec in program.params:
        held = params.get(spec.name, {})
        keys = _keys(spec, held, num_layers)
        for key in keys:
            _check(spec, key, held, {spec.shape, own_shapes[spec.name]}, dtype, num_layers)
        is_stack, is_wanted = None in keys, spec.num_layers is not None
        is_new.append(spec.path[0] == "layers" and is_stack != is_wanted)
        if not is_new[-1]:
            arrays.append(held[keys[0]])
        elif is_stack:
            arrays.append(held[None][spec.layer])
        else:
            arrays.append(jnp.stack([jnp.asarray(held[key]) for key in keys]))
    return Arranged(arrays, is_new)


@functools.cache
def shapes_of_model(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Gives the shape of each parameter, of one layer, as the model has it before it is split for tensor ranks."""
    return {spec.name: spec.shape for spec in build_program(cfg.unsplit()).params}


def _keys(spec: ParamSpec, held: Mapping[int | None, Any], num_layers: int) -> Sequence[int | None]:
    """Which of a parameter's arrays a spec is made of."""
    if spec.path[0] != "layers" or None in held:
        return (None,)
    more = [layer for layer in held if layer is not None and layer >= num_layers]
    if more:
        raise InputError(f"weights: {_name(spec, more[0])} is not expected: the model has {num_layers} layers")
    return (spec.layer,) if spec.num_layers is None else range(num_layers)


def _check(
    spec: ParamSpec,
    key: int | None,
    held: Mapping[int | None, Any],
    shapes: set[tuple[int, ...]],
    dtype: jnp.dtype | None,
    num_layers: int,
) -> None:
    if key not in held:
        raise InputError(f"weights: {_name(spec, key)} is missing")
    array = held[key]
    is_stack = key is None and spec.path[0] == "layers"
    shapes = {(num_layers, *shape) if is_stack else shape for shape in shapes}
    wanted = "floats" if dtype is None else dtype.name
    fits = jnp.issubdtype(array.dtype, jnp.floating) if dtype is None else array.dtype == dtype
    if tuple(array.shape) not in shapes or not fits:
        either = " or ".join(str(list(shape)) for shape in sorted(shapes))
        raise InputError(
            f"weights: {_name(spec, key)} must be {wanted}{either}, got {array.dtype.name}{list(array.shape)}"
        )
    if isinstance(array, jax.Array) and array.is_deleted():
        raise InputError(
            f"weights: {_name(spec, key)} was donated or deleted by the program that held it: hand over the arrays "
            "that came of it"
        )


def _name(spec: ParamSpec, layer: int | None) -> str:
    return spec.name if layer is None else spec.name.replace("layers.", f"layers.{layer}.", 1)


def _walk(node: Any, names: tuple[str, ...], layer: int | None, params: Params) -> None:
    if isinstance(node, nnx.Module):
        node = nnx.to_pure_dict(nnx.state(node, nnx.Param))
    elif isinstance(node, nnx.State):
        node = nnx.to_pure_dict(node)
    elif isinstance(node, nnx.Variable):
        node = node.get_value()
    if isinstance(node, Mapping):
        for key, child in node.items():
            if isinstance(key, int) or str(key).isdecimal():  # orbax makes text of numbers
                _walk(child, names, int(key), params)
            else:
                _walk(child, (*names, str(key)), layer, params)
    elif isinstance(node, list | tuple):
        for number, child in enumerate(node):
            _walk(child, names, number, params)
    elif isinstance(node, jax.Array | np.ndarray):
        params.setdefault(".".join(names), {})[layer] = node
    else:
        raise InputError(f"weights: {'.'.join(names) or 'the tree'} must be arrays, got {type(node).__name__}")
