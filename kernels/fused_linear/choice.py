"""Where a fused product is worth it, and with which constants, from a table that was measured on a kind of device.

Knows sizes and names of devices. Refuses to know how a kernel works.
"""

import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from jaxllm.kernels.all_reduce.inbox import CHUNK
from jaxllm.kernels.matmul.choice import table_path

logger = logging.getLogger(__name__)

TABLES = Path(__file__).parent / "tables"


class NormStack(NamedTuple):
    """The scales of a norm in all layers as one array, and the number of the running layer."""

    scales: Float[Array, "L I"]
    layer: int | Int[Array, ""]


class Fused(NamedTuple):
    """An operation, and the size and type of its matrix; of a gated one the outputs are gate and up."""

    operation: str  # "norm_linear", "norm_gated_linear", "linear_add" or "linear_all_reduce"
    inputs: int
    outputs: int
    dtype: str


@dataclass(frozen=True, slots=True)
class FusedConfig:
    """Constants of the Triton kernel: inputs and outputs of a turn of its loop; a gated one takes as many of each."""

    tile_in: int = 128
    tile_out: int = 32
    num_warps: int = 4
    num_stages: int = 5
    on_tensor_cores: bool = True  # one row can do without

    def takes(self, num_rows: int) -> bool:
        """All rows are one tile."""
        return num_rows <= 16


def fits_a_chunk(config: FusedConfig, num_rows: int) -> bool:
    """Tells whether a program's results are words enough of one chunk to exchange; 16 rows are the least of a tile."""
    rows = 1 if num_rows == 1 and not config.on_tensor_cores else 16
    return rows * config.tile_out <= CHUNK


# For each operation the rows up to which constants hold, in order. None, and beyond the last: one after the other.
Table = Mapping[Fused, tuple[tuple[int, FusedConfig | None], ...]]


def choose(table: Table, fused: Fused, num_rows: int) -> FusedConfig | None:
    """Gives the constants for so many rows: those of the next number of rows that was measured."""
    config = next((config for up_to, config in table.get(fused, ()) if num_rows <= up_to), None)
    return config if config is not None and config.takes(num_rows) else None


@functools.cache
def read_table(device_kind: str) -> Table:
    """Reads the table of a kind of device, once. A kind without one has an empty table, and one line in the log."""
    path = table_path(device_kind, TABLES)
    if not path.exists():
        logger.info("fused products: %s was not measured (no %s); none is used", device_kind, path.name)
        return {}
    return parse_table(json.loads(path.read_text()))


def parse_table(content: Mapping[str, Any]) -> Table:
    """Reads the content of a table's file."""
    table = {}
    for entry in content["products"]:
        rows = [(row["up_to"], row["config"] and FusedConfig(**row["config"])) for row in entry["rows"]]
        table[Fused(*(entry[name] for name in Fused._fields))] = tuple(sorted(rows, key=lambda row: row[0]))
    return table
