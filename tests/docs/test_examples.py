"""Runs the examples of README and the documentation, and holds their code blocks and links against the code."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxllm

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
OWN_TEST = {"adding-a-model.md"}  # pages whose code needs files beside it


def pages_with(info: str) -> list[Path]:
    return [page for page in PAGES if page.name not in OWN_TEST and f"```{info}\n" in page.read_text()]


@pytest.fixture(scope="module")
def shared_llm() -> Iterator[None]:
    """Lets equal LLM(...) calls of all pages give one engine, which outlives the pages' close()."""
    engines: dict[str, jaxllm.LLM] = {}

    def make(*args: Any, **options: Any) -> jaxllm.LLM:
        key = repr((args, options))
        if key not in engines:
            engines[key] = jaxllm.api.llm.LLM(*args, **options)
            engines[key].close = lambda: None
        return engines[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxllm, "LLM", make, raising=False)
        yield
    for engine in engines.values():
        del engine.close
        engine.close()


@pytest.mark.parametrize("page", pages_with("python"), ids=lambda page: page.name)
def test_the_examples_of_a_page_run_and_print_what_it_says(page: Path, run: Callable[..., int], shared_llm: None):
    assert run(page, {}) > 0


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("python slow"), ids=lambda page: page.name)
def test_the_slow_examples_of_a_page_run_and_print_what_it_says(page: Path, run: Callable[..., int]):
    assert run(page, {}, "python slow") > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_path_of_a_page_leads_to_a_file(page: Path):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_of_a_serve_command_exists(page: Path, blocks: Callable):
    from dataclasses import fields

    from jaxllm.config.engine_args import EngineArgs
    from jaxllm.config.server_args import ServerArgs

    known = {"--" + field.name.replace("_", "-") for args in (EngineArgs, ServerArgs) for field in fields(args)}
    known |= {"--config", "--help"}
    commands = [
        line for block in blocks(page) for line in block.text.splitlines() if re.search(r"(?<!bench )\bserve\b", line)
    ]
    used = {flag for line in commands for flag in re.findall(r"\s(--[a-z-]+)", line.partition("serve")[2])}
    assert used - known == set()


def test_every_function_of_the_request_flow_stands_where_it_says():
    rows = re.findall(r"^\| \d+ \| ([^|]+) \|", (ROOT / "docs" / "request-flow.md").read_text(), re.MULTILINE)
    assert len(rows) == 12
    folders = (ROOT / folder for folder in ("jaxllm", "kernels", "mesh", "scheduler"))
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")]

    def stands_in(source: str, names: list[str]) -> bool:
        return all(re.search(rf"^\s*(async )?(def|class) {name}\b", source, re.MULTILINE) for name in names)

    called = [quoted.split(".") for row in rows for quoted in re.findall(r"`([^`]+)`", row)]
    assert [names for names in called if not any(stands_in(source, names) for source in sources)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_that_a_page_gives_with_its_file_stands_there(page: Path):
    for file, name in re.findall(r"`([\w/]+\.py): (\w+)", page.read_text()):
        places = [
            ROOT / top / file for top in ("", "jaxllm", "jaxllm/models/checkpoint") if (ROOT / top / file).exists()
        ]
        assert places, f"{page.name}: there is no {file}"
        assert re.search(rf"^\s*(def|class) {name}\b", places[0].read_text(), re.MULTILINE), (
            f"{page.name}: no {name} in {file}"
        )


def test_the_python_page_names_every_sampling_parameter():
    from dataclasses import fields

    text = (ROOT / "docs" / "python-api.md").read_text()
    assert [f.name for f in fields(jaxllm.SamplingParams) if f"`{f.name}`" not in text] == []


def test_the_index_names_every_page():
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([^)#\s]+\.md)\)", (docs / "index.md").read_text()))
    assert {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"index.md"} - linked == set()
