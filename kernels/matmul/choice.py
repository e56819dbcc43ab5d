"""Which kernel multiplies a matrix of a size, from a table that scripts/tune_kernels.py measured on a kind of device.

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

logger = logging.getLogger(__name__)

TABLES = Path(__file__).parent / "tables"


class Product(NamedTuple):
    """The size of a matrix of one layer, how it is stored, and its type."""

    inputs: int
    outputs: int
    transposed: bool
    dtype: str


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """Constants of the Triton kernel: inputs and outputs of a turn of its loop, and the parts of the inputs."""

    tile_in: int = 64
    tile_out: int = 64
    split: int = 1
    num_warps: int = 4
    num_stages: int = 4
    on_tensor_cores: bool = True  # one row can do without

    def takes(self, product: Product, num_rows: int) -> bool:
        """All rows are one tile."""
        return num_rows <= 128


@dataclass(frozen=True, slots=True)
class MosaicConfig:
    """Constants of the Mosaic kernel: the tile of one warpgroup, and which way the two of a program lie."""

    tile_rows: int = 128
    tile_out: int = 128
    tile_in: int = 64
    num_stages: int = 4
    side_by_side: bool = True  # along the outputs, otherwise along the rows
    tiles_in_a_row: int = 8
    rows_first: bool = True  # tiles of the same outputs follow each other

    def takes(self, product: Product, num_rows: int) -> bool:
        """Whole tiles of two warpgroups, of 16-bit numbers."""
        rows = self.tile_rows * (1 if self.side_by_side else 2)
        outputs = self.tile_out * (2 if self.side_by_side else 1)
        is_whole = num_rows % rows == 0 and product.outputs % outputs == 0 and product.inputs % self.tile_in == 0
        return is_whole and not product.transposed and product.dtype in ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class TurnedConfig:
    """Constants of the turned Mosaic kernel: outputs of a warpgroup, rows and inputs of a turn, and the parts."""

    tile_out: int = 64
    tile_rows: int = 64
    tile_in: int = 64
    num_stages: int = 4
    split: int = 1
    cluster: int = 1  # blocks that share the rows they read

    def takes(self, product: Product, num_rows: int) -> bool:
        """Rows by 8 and outputs by 64, as they lie in shared memory, whole turns and parts, of 16-bit numbers."""
        is_whole = num_rows % 8 == 0 and product.outputs % 64 == 0 and product.inputs % (self.tile_in * self.split) == 0
        return is_whole and product.dtype in ("bfloat16", "float16")


Config = FewRowsConfig | MosaicConfig | TurnedConfig


class Stack(NamedTuple):
    """The matrices of all layers as one array, and the number of the running layer."""

    matrices: Float[Array, "L I O"]
    layer: int | Int[Array, ""]


class Choice(NamedTuple):
    """A kernel with its constants; XLA has none."""

    kernel: str  # "xla", "triton", "mosaic" or "turned"
    config: Config | None = None


XLA = Choice("xla")
CONFIGS: dict[str, type[Config]] = {"triton": FewRowsConfig, "mosaic": MosaicConfig, "turned": TurnedConfig}

# For each product the rows up to which a choice holds, in order. Beyond the last it is XLA's.
Table = Mapping[Product, tuple[tuple[int, Choice], ...]]


def choose(table: Table, product: Product, num_rows: int) -> Choice:
    """Gives the choice for so many rows: that of the next number of rows that was measured, XLA where it cannot be."""
    choice = next((choice for up_to, choice in table.get(product, ()) if num_rows <= up_to), XLA)
    return choice if choice.config is None or choice.config.takes(product, num_rows) else XLA


@functools.cache
def read_table(device_kind: str) -> Table:
    """Reads the table of a kind of device, once. A kind without one has an empty table, and one line in the log."""
    path = table_path(device_kind)
    if not path.exists():
        logger.info("matmul: %s was not measured (no %s); XLA multiplies everything", device_kind, path.name)
        return {}
    return parse_table(json.loads(path.read_text()))


def table_path(device_kind: str, folder: Path = TABLES) -> Path:
    """Where the table of a kind of device lies."""
    return folder / f"{device_kind.replace(' ', '_')}.json"


def parse_table(content: Mapping[str, Any]) -> Table:
    """Reads the content of a table's file."""
    table = {}
    for entry in content["products"]:
        rows = []
        for row in entry["rows"]:
            config = row.get("config")
            rows.append((row["up_to"], Choice(row["kernel"], config and CONFIGS[row["kernel"]](**config))))
        table[Product(*(entry[name] for name in Product._fields))] = tuple(sorted(rows, key=lambda row: row[0]))
    return table
