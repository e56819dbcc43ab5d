"""Where the engine wants each parameter on a caller's mesh, for trainers. Knows names and shapes; holds no arrays."""

from typing import Any

from jax.sharding import Mesh, NamedSharding

from jaxllm.config.errors import InputError
from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.caller import callers_axes
from jaxllm.models.config import ModelConfig
from jaxllm.models.forward import build_program, weights_tree


def param_shardings(
    cfg: ModelConfig, mesh: Mesh, axis_rules: AxisRules | None = None, *, stacked: bool = False
) -> dict[str, Any]:
    """Gives the shardings with which an engine on this mesh uses a program's arrays in place.

    They are a tree as nnx.to_pure_dict(nnx.state(decoder)) has it or, with `stacked`, one with the layers stacked.

    Raises:
        InputError: the axis rules do not fit the mesh.
    """
    try:
        axes = callers_axes(mesh, axis_rules)
    except ValueError as error:
        raise InputError(str(error)) from None
    own, params = AxisRules(), build_program(cfg, by_layer=not stacked).params
    tree = weights_tree({spec.path: NamedSharding(mesh, axes.spec(own.spec(*spec.stored_axes))) for spec in params})
    return tree if stacked else tree | {"layers": dict(enumerate(tree["layers"]))}
