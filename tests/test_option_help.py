from dataclasses import dataclass

import pytest

from jaxllm.config.engine_args import flag
from jaxllm.config.errors import InputError
from jaxllm.options import OptionParser, add_hidden_options, add_options


@dataclass(frozen=True, kw_only=True)
class Own:
    num_laps: int = flag(3, "how often to run")


@dataclass(frozen=True, kw_only=True)
class Engine:
    dtype: str = flag("auto", "the type")
    block_size: int = flag(16, "tokens in a block")
    enforce_eager: bool = flag(False, "no compilation ahead")
    novelty: str | None = flag(None, "in no group yet")


@pytest.fixture
def parser() -> OptionParser:
    parser = OptionParser(prog="jaxllm run", description="runs laps", usage="jaxllm run [flags]", own=("run",))
    add_options(parser, Own, "run")
    add_options(parser, Engine, "EngineConfig", grouped=True)
    add_hidden_options(parser, {"tensor_parallel_size": 1, "api_key": None, "enable_lora": False})
    return parser


def help_of(parser: OptionParser, argument: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit:
        parser.parse([argument])
    assert exit.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_plain_help_shows_the_commands_own_flags_and_names_the_other_groups(
    argument: str, parser: OptionParser, capsys: pytest.CaptureFixture[str]
):
    text = help_of(parser, argument, capsys)
    assert text.startswith("usage: jaxllm run [flags]\n\nruns laps\n")
    assert "--num-laps SIZE" in text
    assert "--dtype" not in text
    assert "  CacheConfig           the paged KV cache\n" in text
    assert "  EngineConfig  " in text


def test_a_group_is_shown_by_its_name_in_any_case(parser: OptionParser, capsys: pytest.CaptureFixture[str]):
    for title in ("CacheConfig", "cacheconfig"):
        text = help_of(parser, f"--help={title}", capsys)
        assert "--block-size SIZE" in text
        assert "--dtype" not in text
    assert help_of(parser, "--help=listgroup", capsys).split()[0] == "run"


@pytest.mark.parametrize("name", ["block-size", "block_size", "--block-size"])
def test_one_flag_is_shown_with_its_default(name: str, parser: OptionParser, capsys: pytest.CaptureFixture[str]):
    text = help_of(parser, f"--help={name}", capsys)
    assert text.split() == ["--block-size", "SIZE", "tokens", "in", "a", "block", "[16]"]


def test_a_word_finds_every_flag_that_has_it_in_its_name(parser: OptionParser, capsys: pytest.CaptureFixture[str]):
    text = help_of(parser, "--help=e", capsys)
    assert text.count("tokens in a block") == 1
    assert text.count("no compilation ahead") == 1  # though it has two spellings
    assert "--num-laps" not in text


def test_a_flag_that_is_not_built_yet_says_so(parser: OptionParser, capsys: pytest.CaptureFixture[str]):
    assert "not built yet; only 1 is accepted" in help_of(parser, "--help=tensor-parallel-size", capsys)
    assert help_of(parser, "--help=api_key", capsys).endswith("not built yet\n")
    assert "api-key" not in help_of(parser, "--help=all", capsys)


def test_everything_is_shown_on_demand(parser: OptionParser, capsys: pytest.CaptureFixture[str]):
    for topic in ("all", "page"):  # no terminal, so no pager
        text = help_of(parser, f"--help={topic}", capsys)
        for name in ("--num-laps", "--dtype", "--block-size", "--no-enforce-eager", "--novelty"):
            assert name in text


def test_an_unknown_topic_names_the_nearest_known_one(parser: OptionParser):
    with pytest.raises(InputError, match=r"called 'blocksize'; did you mean --help=block-size\?"):
        parser.parse(["--help=blocksize"])
