from pathlib import Path

import pytest

from jaxllm.config.errors import InputError
from jaxllm.config_file import read_config

FLAGS = {"--max-len": False, "--names": False, "--eager": True, "--no-eager": True, "--extra": False}


@pytest.fixture
def read(tmp_path: Path):
    def call(content: str) -> list[str]:
        (tmp_path / "c.yaml").write_text(content)
        return read_config(str(tmp_path / "c.yaml"), FLAGS, FLAGS.__getitem__)

    return call


def test_every_kind_of_value_becomes_what_one_would_type(read):
    assert read("max-len: 4K\nnames: [a, b]\neager: true\nextra: {a: [1]}") == [
        "--max-len=4K",
        '--names=["a", "b"]',
        "--eager",
        '--extra={"a": [1]}',
    ]
    assert read("max_len: -1\neager: false\nextra: true") == ["--max-len=-1", "--no-eager", "--extra=true"]
    assert read("max_len:\n# nothing more\n") == []
    assert read("") == []


def test_what_is_no_text_is_refused(tmp_path: Path):
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read: it is no text"):
        read_config(str(tmp_path / "b.yaml"), FLAGS, FLAGS.__getitem__)


def test_a_tag_that_would_run_code_is_no_valid_yaml(read):
    with pytest.raises(InputError, match="line 1: no valid YAML"):
        read("max-len: !!python/object/apply:os.system ['true']")
