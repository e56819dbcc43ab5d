import pytest

from jaxllm.api.start import read_chat_template
from jaxllm.config.errors import InputError

NAMED = {"default": "plain", "tool_use": "tools"}


def test_a_chat_template_is_the_models_own_a_file_or_a_text(tmp_path):
    (tmp_path / "mine.jinja").write_text("from a file")
    assert read_chat_template("tool_use", NAMED) == "tools"
    assert read_chat_template(str(tmp_path / "mine.jinja"), NAMED) == "from a file"
    assert read_chat_template("{{ messages }}", NAMED) == "{{ messages }}"


def test_a_chat_template_that_is_none_of_these_is_refused_with_the_names_there_are():
    with pytest.raises(InputError, match=r"'rag' is neither .* one of the model's own \(it has default, tool_use\)$"):
        read_chat_template("rag", NAMED)
    with pytest.raises(InputError, match=r"nor one of the model's own$"):
        read_chat_template("rag", {})
