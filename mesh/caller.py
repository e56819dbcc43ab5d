"""A caller's mesh, whose axes have the caller's names -> the engine's own over the same devices. Knows no models.

The engine's programs name the axes (data, tensor), and split nothing over any other.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxllm.mesh.axes import AxisRules, names_of
from jaxllm.mesh.build import AXIS_NAMES

_DATA, _TENSOR = ("batch", "kv_blocks"), ("q_heads", "kv_heads", "ffn", "vocab")
_WHOLE = ("embed", "head_dim", "layers")
_NO_MESH = Mesh(np.empty((), object), ())


class CallersAxes(NamedTuple):
    """The axes of a caller's mesh that are the engine's data and tensor axis; none makes an axis of size 1."""

    data: tuple[str, ...]
    tensor: tuple[str, ...]

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Says in the caller's names what a spec says in the engine's."""
        own = {"data": self.data, "tensor": self.tensor}
        named = [tuple(name for axis in names_of(part) for name in own[axis]) for part in spec]
        return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in named))


def callers_axes(mesh: Mesh, rules: AxisRules | None = None) -> CallersAxes:
    """Reads a table of the caller's axis names; without one, the axes called data and tensor are meant.

    Raises:
        ValueError: the mesh has no such axis, or the table splits by head, feed-forward and vocabulary over different
            axes, or something that the engine keeps whole.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    if rules is None:
        data, tensor = (tuple(name for name in mesh.axis_names if name == own) for own in AXIS_NAMES)
        if not data and not tensor:
            raise ValueError(
                f"the mesh has the axes {_show(mesh.axis_names)}, neither data nor tensor: say which are which with "
                "axis_rules=AxisRules(batch=..., kv_blocks=..., q_heads=..., kv_heads=..., ffn=..., vocab=...)"
            )
        return CallersAxes(data, tensor)
    for logical in _WHOLE:
        if getattr(rules, logical) is not None:
            raise ValueError(f"axis_rules: {logical}={getattr(rules, logical)!r}, but the engine keeps {logical} whole")
    axes = CallersAxes(_one(rules, _DATA), _one(rules, _TENSOR))
    for group, names in zip((_DATA, _TENSOR), axes, strict=True):
        for name in names:
            if name not in mesh.axis_names:
                raise ValueError(
                    f"axis_rules: {' and '.join(group)} are split over {name!r}, but the mesh has the axes "
                    f"{_show(mesh.axis_names)}: name one of these, or None"
                )
    both = set(axes.data) & set(axes.tensor)
    if both:
        raise ValueError(f"axis_rules: {both.pop()!r} would split both the batch and the heads")
    return axes


def engine_mesh(mesh: Mesh, axes: CallersAxes) -> Mesh:
    """Gives the engine's mesh (data, tensor, and the caller's other axes) over the same devices.

    Several axes for one are its major and minor parts, in their order.
    """
    others = [name for name in mesh.axis_names if name not in (*axes.data, *axes.tensor)]
    order = [mesh.axis_names.index(name) for name in (*axes.data, *axes.tensor, *others)]
    sizes = [int(np.prod([mesh.shape[name] for name in names])) for names in axes]
    devices = mesh.devices.transpose(order).reshape(*sizes, *(mesh.shape[name] for name in others))
    return Mesh(devices, (*AXIS_NAMES, *_apart(others)))


def without_callers_mesh() -> AbstractContextManager[object]:
    """Takes away the mesh that the caller has set (jax.set_mesh), as long as the engine's own programs are at work."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    return jax.set_mesh(_NO_MESH)


def _one(rules: AxisRules, group: tuple[str, ...]) -> tuple[str, ...]:
    """The one axis, or tuple of axes, that all of these rules name, but for those that name none."""
    named: dict[tuple[str, ...], str] = {}
    for logical in group:
        if names := names_of(getattr(rules, logical)):
            named.setdefault(names, logical)
    if len(named) > 1:
        pairs = ", ".join(f"{logical}={getattr(rules, logical)!r}" for logical in named.values())
        raise ValueError(f"axis_rules: {pairs} differ, but the engine splits {', '.join(group)} over one axis")
    return next(iter(named), ())


def _apart(names: Sequence[str]) -> Iterator[str]:
    """Renames axes that are called as one of the engine's, and are not meant."""
    taken = {*names, *AXIS_NAMES}
    for name in names:
        other = name
        while other in AXIS_NAMES or (other != name and other in taken):
            other += "_"
        yield other


def _show(names: Sequence[str]) -> str:
    return ", ".join(map(str, names)) or "none"
