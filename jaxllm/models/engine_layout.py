"""The decoder's own arrays as a checkpoint: the names and pieces of its parameters, unsplit, each layer's by itself.

Knows no file. What is stored so serves every mesh and both ways of keeping layers: models/placement.py cuts it.
"""

from typing import Any

import jax

from jaxllm.models.config import ModelConfig
from jaxllm.models.family import Piece, Pieces
from jaxllm.models.forward import ParamSpec, Weights, build_program


def layout_pieces(cfg: ModelConfig) -> Pieces:
    """Gives the pieces of a checkpoint in the decoder's layout, of an unsplit configuration."""
    return {spec.name: (Piece(_name(spec), spec.shape, linear=False),) for spec in build_program(cfg).params}


def layout_arrays(params: tuple[ParamSpec, ...], weights: Weights) -> dict[str, jax.Array]:
    """Gives the arrays of an unsplit decoder by the names that `layout_pieces` reads them under."""
    found = {}
    for spec in params:
        array: Any = weights
        for key in spec.path:
            array = array[key]
        for layer in spec.layers:
            found[_name(spec).format(l=layer)] = array if spec.num_layers is None else array[layer]
    return found


def _name(spec: ParamSpec) -> str:
    return spec.name.replace("layers.", "layers.{l}.", 1) if spec.path[0] == "layers" else spec.name
