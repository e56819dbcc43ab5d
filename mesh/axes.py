"""Logical axes -> mesh axes: the one table that says what is split over what. Knows no models and no devices."""

from dataclasses import dataclass

from jax.sharding import PartitionSpec

MeshAxis = str | tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class AxisRules:
    """Which mesh axis splits each logical axis, or which several. None keeps the axis whole."""

    batch: MeshAxis = "data"
    kv_blocks: MeshAxis = "data"
    q_heads: MeshAxis = "tensor"
    kv_heads: MeshAxis = "tensor"
    ffn: MeshAxis = "tensor"
    vocab: MeshAxis = "tensor"
    embed: MeshAxis = None
    head_dim: MeshAxis = None
    layers: MeshAxis = None

    def spec(self, *logical: str | None) -> PartitionSpec:
        """Gives the PartitionSpec of an array with these logical axes.

        Raises:
            ValueError: two of them would split the same mesh axis.
        """
        axes = [getattr(self, name) if name else None for name in logical]
        split = [name for axis in axes for name in names_of(axis)]
        if len(split) != len(set(split)):
            raise ValueError(f"{logical} would split one mesh axis twice: {axes}")
        return PartitionSpec(*axes)


def names_of(axis: MeshAxis) -> tuple[str, ...]:
    """Gives an entry of the table, or of a PartitionSpec, as a tuple."""
    return (axis,) if isinstance(axis, str) else tuple(axis or ())
