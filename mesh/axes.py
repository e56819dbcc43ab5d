"""Logical axes -> mesh axes: the one table that says what is split over what. Knows no models and no devices."""

from dataclasses import dataclass

from jax.sharding import PartitionSpec

MeshAxis = str | None


@dataclass(frozen=True, slots=True)
class AxisRules:
    """Which mesh axis splits each logical axis. None keeps the axis whole."""

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
        split = [axis for axis in axes if axis]
        if len(split) != len(set(split)):
            raise ValueError(f"{logical} would split one mesh axis twice: {axes}")
        return PartitionSpec(*axes)
