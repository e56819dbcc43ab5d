import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from jaxllm.config.engine_args import flag
from jaxllm.config.errors import InputError
from jaxllm.options import OptionParser, add_hidden_options, add_options, name_flags, parse_size, parse_size_or_auto


@dataclass(frozen=True, kw_only=True)
class Flags:
    name: str = flag("x", "a name")
    folder: str | None = flag(None, "a folder")
    max_len: int | None = flag(None, "a length")
    count: int = flag(4, "100% a count")
    share: float = flag(0.5, "a share")
    eager: bool = flag(True, "a switch")
    names: tuple[str, ...] = flag(("*",), "several names")
    extra: Mapping[str, Any] | None = flag(None, "an object")


@pytest.fixture
def parser() -> OptionParser:
    parser = OptionParser(prog="test")
    parser.add_argument("place", nargs="?")
    add_options(parser, Flags, "flags")
    add_hidden_options(parser, {"tensor_parallel_size": 1, "api_key": None, "magic": False})
    return parser


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1.5m", 1_500_000),
        ("2M", 2 << 20),
        ("3g", 3_000_000_000),
        ("0.5G", 1 << 29),
        ("-1", -1),
        ("1T", 1 << 40),
    ],
)
def test_sizes_take_suffixes_small_for_1000s_and_capital_for_1024s(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "4kk", "1.00001k", "4 k", "0x10", "1e3", "1_000", "nan"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
        parse_size(text)


def test_auto_leaves_the_choice_open():
    assert parse_size_or_auto("auto") is None
    assert parse_size_or_auto("2k") == 2000


def test_only_what_was_given_has_a_value(parser: OptionParser):
    assert parser.parse([]) == {"place": None}


def test_every_type_of_field_has_its_spelling(parser: OptionParser):
    arguments = ["there", "--name", "n", "--folder=f", "--max-len", "1k", "--count", "2K", "--share", "0.25"]
    assert parser.parse([*arguments, "--no-eager", "--names", "a", "b"]) == {
        "place": "there",
        "name": "n",
        "folder": "f",
        "max_len": 1000,
        "count": 2048,
        "share": 0.25,
        "eager": False,
        "names": ("a", "b"),
    }


def test_objects_are_written_as_json(parser: OptionParser):
    assert parser.parse(["--extra", '{"a": {"b": [1, null]}}'])["extra"] == {"a": {"b": [1, None]}}
    with pytest.raises(InputError, match=r"--extra: '\[1\]' is no JSON object: write it as "):
        parser.parse(["--extra", "[1]"])
    with pytest.raises(InputError, match=r"--extra: '\{a: 1\}' is no JSON: Expecting property name"):
        parser.parse(["--extra={a: 1}"])


def test_underscores_short_names_and_json_lists_are_read_as_vllm_reads_them(parser: OptionParser):
    assert parser.parse(["--max_len=5", "-tp", "2", "--names", '["a", "b"]']) == {
        "place": None,
        "max_len": 5,
        "tensor_parallel_size": 2,
        "names": ("a", "b"),
    }
    assert parser.parse(["--name", "a_b", "--folder=c_d"])["folder"] == "c_d"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-lenn", "4"], "unknown flag --max-lenn; did you mean --max-len?"),
        (["--max-lenn=4"], "unknown flag --max-lenn; did you mean --max-len?"),
        (["--max"], "unknown flag --max"),
        (["--qqqqqq"], "unknown flag --qqqqqq"),
        (["here", "there"], "'there' belongs to no flag"),
        (["--count"], "--count: expected one argument"),
        (["--count", "many"], "--count: 'many' is not a whole number"),
        (["--names", "[1"], "'[1' is no JSON list"),
    ],
)
def test_a_mistake_is_told_with_the_flag(parser: OptionParser, arguments: list[str], says: str):
    with pytest.raises(InputError) as raised:
        parser.parse(arguments)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_help_tells_defaults_and_hides_what_is_only_refused(parser: OptionParser):
    text = " ".join(parser.format_help().split())
    assert "--count SIZE 100% a count [4]" in text
    assert "--eager, --no-eager a switch [on]" in text
    assert "several names [*]" in text
    assert "api-key" not in text


def test_field_names_in_messages_become_flags_and_plain_words_stay():
    names = frozenset(("max_len", "model", "dtype"))
    assert name_flags("max_len 4 is too small: raise max_len", names) == "--max-len 4 is too small: raise --max-len"
    assert name_flags("dtype='x' does not fit the model", names) == "--dtype='x' does not fit the model"
    assert name_flags("no file '/a/max_len/b'; other_name", names) == "no file '/a/max_len/b'; other_name"
