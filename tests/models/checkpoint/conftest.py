"""Writes small GGUF and safetensors files for the tests of the readers."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

# Stored values (or raw blocks) and their type.
StoredValues = tuple[np.ndarray, gguf.GGMLQuantizationType]
WriteGGUF = Callable[..., Path]

# Wide enough for one block of 256; 4 query heads of 64 rows and 2 key heads.
WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 4, 2, 64, 32
METADATA: dict[str, object] = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": WIDTH,
    "feed_forward_length": 256,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": HEAD_DIM,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def f32(values: np.ndarray) -> StoredValues:
    return np.asarray(values, np.float32), gguf.GGMLQuantizationType.F32


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """Writes a file of one layer; `tensors` and `metadata` replace the defaults, and a None removes one."""

    def write(tensors: dict | None = None, metadata: dict | None = None, architecture: str = "llama") -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in {**METADATA, **(metadata or {})}.items():
            full = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{key}"
            if isinstance(value, bool):
                writer.add_bool(full, value)
            elif isinstance(value, int):
                writer.add_uint32(full, value)
            elif isinstance(value, float):
                writer.add_float32(full, value)
            elif isinstance(value, str):
                writer.add_string(full, value)
            elif isinstance(value, list):
                writer.add_array(full, value)
        defaults = {
            "token_embd.weight": f32(np.arange(VOCAB * WIDTH).reshape(VOCAB, WIDTH)),
            "output_norm.weight": f32(np.ones(WIDTH)),
        }
        for name, stored in {**defaults, **(tensors or {})}.items():
            if stored is not None:
                writer.add_tensor(name, stored[0], raw_dtype=stored[1])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def write_safetensors() -> Callable[..., Path]:
    """Writes a safetensors file from a header, which need not be honest, and data."""

    def write(path: Path, header: dict | bytes, data: bytes = b"") -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        return path

    return write
