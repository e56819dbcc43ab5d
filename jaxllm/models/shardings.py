"""Where the engine wants each parameter on a caller's mesh, for trainers. Knows names and shapes; holds no arrays."""

import math
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config.errors import InputError
from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.caller import callers_axes
from jaxllm.models.config import ModelConfig
from jaxllm.models.forward import build_program, weights_tree
from jaxllm.models.given import shapes_of_model


def param_shardings(
    cfg: ModelConfig, mesh: Mesh, axis_rules: AxisRules | None = None, *, stacked: bool = False
) -> dict[str, Any]:
    """Gives the shardings with which an engine on this mesh uses a program's arrays in place.

    They are a tree as nnx.to_pure_dict(nnx.state(decoder)) has it or, with `stacked`, one with the layers stacked.
    What the engine has to lay out for tensor ranks (heads or a vocabulary that do not divide) is whole on each device.

    Raises:
        InputError: the axis rules do not fit the mesh.
    """
    try:
        axes = callers_axes(mesh, axis_rules)
    except ValueError as error:
        raise InputError(str(error)) from None
    tensor = math.prod(mesh.shape[name] for name in axes.tensor)
    own, shapes = AxisRules(), shapes_of_model(cfg)
    specs = {
        spec.path: own.spec(*spec.stored_axes) if spec.shape == shapes[spec.name] else PartitionSpec()
        for spec in build_program(cfg.split(tensor), by_layer=not stacked).params
    }
    tree = weights_tree({path: NamedSharding(mesh, axes.spec(spec)) for path, spec in specs.items()})
    return tree if stacked else tree | {"layers": dict(enumerate(tree["layers"]))}
