"""Presents one GGUF file as if it were the Hugging Face checkpoint. Knows no model and parses no tokenizer."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.file_bytes import map_bytes, map_columns
from jaxllm.models.checkpoint.gguf_config import hf_config, hf_generation_config
from jaxllm.models.checkpoint.gguf_families import TensorFacts
from jaxllm.models.checkpoint.gguf_fields import GGUFFields
from jaxllm.models.checkpoint.gguf_header import GGUFHeader, GGUFTensor, read_gguf_header
from jaxllm.models.checkpoint.gguf_names import ARCHITECTURES, GGUFArchitecture
from jaxllm.models.checkpoint.source import check_columns, check_rows, lookup

# Values decoded at a time: the decoder's temporaries are several times its output.
_PIECE_VALUES = 1 << 20
_ROPE_FACTORS = {
    "rope_freqs.weight": "rope_factors",
    "rope_factors_long.weight": "long_factors",
    "rope_factors_short.weight": "short_factors",
}
_PLAIN_DTYPES = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
# Quantised weights were mostly made from bfloat16.
_TORCH_DTYPES = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A stored tensor and how its rows and values become Hugging Face's. `head_dim` 0: the rows are in order."""

    stored: GGUFTensor
    head_dim: int
    offset: float


class GGUFFile:
    """A GGUF file under Hugging Face's names, row order and values.

    Raises:
        InputError: the file is unreadable, truncated or not GGUF, or of an architecture or type that is not readable.
    """

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_gguf_header(path)
        architecture = _architecture(path, header)
        fields = GGUFFields(path, str(header.metadata["general.architecture"]), header.metadata)
        stored = {_hf_name(path, architecture, name): name for name in header.tensors if name not in _ROPE_FACTORS}
        if "model.embed_tokens.weight" not in stored:
            raise InputError(
                f"{path} has no token_embd.weight among its {len(stored)} tensors: it is not a language model"
            )
        self.config: dict[str, Any] = hf_config(fields, _facts(path, header, stored))
        self.generation_config: dict[str, Any] = hf_generation_config(fields)
        self._tokenizer = {
            key: value
            for key, value in header.metadata.items()
            if key.startswith("tokenizer.") or key == "general.architecture"
        }
        self._tensors = {
            hf_name: _Tensor(
                header.tensors[name],
                head_dim=self.config["head_dim"] if architecture.is_interleaved(name) else 0,
                offset=architecture.offset(name),
            )
            for hf_name, name in stored.items()
        }
        for hf_name, tensor in self._tensors.items():
            if tensor.head_dim and (tensor.head_dim % 2 or tensor.stored.shape[0] % tensor.head_dim):
                raise InputError(
                    f"{path}: the {tensor.stored.shape[0]} rows of {hf_name} are not heads of {tensor.head_dim} rows"
                )

    def names(self) -> Iterable[str]:
        """Lists the tensors in the order of the file."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Gives the shape of the whole tensor."""
        return lookup(self._tensors, name, self.path).stored.shape

    def dtype(self, name: str) -> np.dtype:
        """Gives the dtype of the decoded values: float32, except where whole tensors are stored in 16 bits."""
        tensor = lookup(self._tensors, name, self.path)
        if tensor.offset:
            return np.dtype(np.float32)
        return _PLAIN_DTYPES.get(tensor.stored.kind, np.dtype(np.float32))

    def read(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> np.ndarray:
        """Decodes rows start:stop, or columns of them, a few at a time."""
        tensor = lookup(self._tensors, name, self.path)
        num_rows, *row_shape = tensor.stored.shape
        check_rows(name, num_rows, start, stop)
        if columns is not None:
            check_columns(name, tensor.stored.shape, columns)
            row_shape = [columns[1] - columns[0]]
        rows = np.empty((stop - start, *row_shape), self.dtype(name))
        step = max(1, _PIECE_VALUES // max(1, prod(row_shape)))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            rows[first - start : last - start] = self._piece(tensor, first, last, columns)
        if tensor.offset:
            rows -= tensor.offset
        return rows

    def tokenizer_fields(self) -> Mapping[str, object]:
        """Gives the metadata under `tokenizer.` and the architecture, keys in full, arrays as lists."""
        return self._tokenizer

    def _piece(self, tensor: _Tensor, first: int, last: int, columns: tuple[int, int] | None) -> np.ndarray:
        stored, head_dim = tensor.stored, tensor.head_dim or 1
        block, size = GGML_QUANT_SIZES[stored.kind]
        begin, end = first // head_dim * head_dim, -(-last // head_dim) * head_dim
        start, skipped = stored.start + begin * stored.row_bytes, 0
        if columns is None:
            raw = map_bytes(self.path, start, stored.start + end * stored.row_bytes)
            raw = raw.reshape(end - begin, stored.row_bytes)
        else:  # whole blocks are decoded
            inner = columns[0] // block * size, -(-columns[1] // block) * size
            raw, skipped = map_columns(self.path, start, end - begin, stored.row_bytes, *inner), columns[0] % block
        if tensor.head_dim:
            raw = raw[_interleaved_rows(first, last, head_dim) - begin]
        if columns is None:
            return _decode(raw, stored).reshape(last - first, *stored.shape[1:])
        return _decode(np.ascontiguousarray(raw), stored)[:, skipped : skipped + columns[1] - columns[0]]


def _interleaved_rows(first: int, last: int, head_dim: int) -> np.ndarray:
    """Says in which row of the file each of Hugging Face's rows lies: halves of a head are shuffled like cards."""
    head, within = np.divmod(np.arange(first, last), head_dim)
    half, index = np.divmod(within, head_dim // 2)
    return head * head_dim + 2 * index + half


def _decode(raw: np.ndarray, stored: GGUFTensor) -> np.ndarray:
    plain = _PLAIN_DTYPES.get(stored.kind)
    return dequantize(raw, stored.kind) if plain is None else raw.view(plain)


def _architecture(path: Path, header: GGUFHeader) -> GGUFArchitecture:
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InputError(f"{path} holds architecture {name!r:.40}, readable from GGUF are {', '.join(ARCHITECTURES)}")
    parts = header.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise InputError(f"{path} is one of {parts} parts: join them with `llama-gguf-split --merge`")
    return ARCHITECTURES[str(name)]


def _hf_name(path: Path, architecture: GGUFArchitecture, name: str) -> str:
    hf_name = architecture.hf_name(name)
    if hf_name is None:
        raise InputError(f"{path} holds a tensor {name}, which its architecture is not known to have")
    return hf_name


def _facts(path: Path, header: GGUFHeader, stored: dict[str, str]) -> TensorFacts:
    values: Counter[str] = Counter()
    for tensor in header.tensors.values():
        values[_TORCH_DTYPES.get(tensor.kind, "bfloat16")] += prod(tensor.shape)
    return TensorFacts(
        vocab_size=header.tensors[stored["model.embed_tokens.weight"]].shape[0],
        tied="lm_head.weight" not in stored,
        attention_bias=any(name.endswith("_proj.bias") and ".self_attn." in name for name in stored),
        mlp_bias=any(name.endswith("_proj.bias") and ".mlp." in name for name in stored),
        torch_dtype=values.most_common(1)[0][0],
        **{
            fact: _factors(path, header.tensors[name]) for name, fact in _ROPE_FACTORS.items() if name in header.tensors
        },
    )


def _factors(path: Path, stored: GGUFTensor) -> np.ndarray:
    return _decode(map_bytes(path, stored.start, stored.stop), stored).astype(np.float64).ravel()
