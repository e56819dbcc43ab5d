import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jaxllm.config.errors import InputError
from jaxllm.text.folder_tokenizer import tokenizer_from_folder

VOCAB = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "<turn>": 5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer.json that adds BOS, cuts texts at 3 tokens and pads them, as some published ones do."""
    backend = Backend(models.WordLevel(VOCAB, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(3)
    backend.enable_padding(length=3)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config", {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": False})
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(value))


def test_tokenizer_json_is_read_and_its_post_processor_trusted(folder: Path) -> None:
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.encode("a b a b") == [1, 3, 4, 3, 4]  # neither cut nor padded
    assert tokenizer.encode("a") == [1, 3]
    assert tokenizer.encode("a", add_special_tokens=False) == [3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, (2,), 6)
    assert tokenizer.decode([1, 3, 4, 2]) == "ab"
    assert tokenizer.chat_template is None


def test_eos_ids_of_the_generation_config_follow_the_main_one(folder: Path) -> None:
    write(folder, "config", {"eos_token_id": 4})
    assert tokenizer_from_folder(folder).eos_token_ids == (2, 4)
    write(folder, "generation_config", {"eos_token_id": [5, 2]})
    assert tokenizer_from_folder(folder).eos_token_ids == (2, 5)
    write(folder, "generation_config", {"eos_token_id": 5})
    write(folder, "tokenizer_config", {})
    assert tokenizer_from_folder(folder).eos_token_ids == (5,)


def test_tokens_of_the_config_are_added_and_made_special(folder: Path) -> None:
    entry = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    listed = {
        "5": {"content": "<turn>", "special": True, **entry},
        "6": {"content": "<tool>", "special": False, **entry},
    }
    write(folder, "tokenizer_config", {"added_tokens_decoder": listed, "additional_special_tokens": ["<extra>"]})
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.encode("a<turn>b<tool><extra>", add_special_tokens=False) == [3, 5, 4, 6, 7]
    assert tokenizer.decode([3, 5, 4, 6, 7]) == "ab<tool>"
    assert tokenizer.special_token_ids == {0, 1, 2, 5, 7}


def test_the_special_tokens_map_counts_where_the_config_lists_no_tokens(folder: Path) -> None:
    write(folder, "special_tokens_map", {"eos_token": {"content": "<turn>"}, "pad_token": "<pad>"})
    tokenizer = tokenizer_from_folder(folder)
    assert (tokenizer.eos_token, tokenizer.token_to_id("<pad>")) == ("<turn>", 6)
    write(folder, "tokenizer_config", {"eos_token": "</s>", "added_tokens_decoder": {}})
    assert tokenizer_from_folder(folder).eos_token == "</s>"


def test_chat_templates_are_found_in_each_place_and_files_win(folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    base = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, "tokenizer_config", base | {"chat_template": "{{ bos_token }}one"})
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.render_chat(messages) == "<s>one"
    assert tokenizer.apply_chat_template(messages, chat_template="{{ bos_token }} a") == [1, 3]
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "two, tools"}]
    write(folder, "tokenizer_config", base | {"chat_template": named})
    assert tokenizer_from_folder(folder).render_chat(messages, tools=[{}]) == "two, tools"
    (folder / "chat_template.jinja").write_text("three é")
    assert tokenizer_from_folder(folder).render_chat(messages) == "three é"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("three, tools")
    assert tokenizer_from_folder(folder).render_chat(messages, tools=[{}]) == "three, tools"


def test_a_folder_without_tokenizer_json_is_loaded_through_transformers(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "<|endoftext|>": 4}
    write(tmp_path, "vocab", vocab)
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    write(tmp_path, "tokenizer_config", {"tokenizer_class": "GPT2Tokenizer"})
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.encode("ab ab") == [3, 2, 3]
    assert (tokenizer.eos_token_ids, tokenizer.decode([3, 4])) == ((4,), "ab")


def test_a_folder_without_any_tokenizer_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no tokenizer\.json.*skip_tokenizer_init"):
        tokenizer_from_folder(tmp_path)
    with pytest.raises(InputError, match=r"is no folder.*skip_tokenizer_init"):
        tokenizer_from_folder(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must hold a JSON object, got list"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder is broken"),
        ("generation_config.json", "\x00", "generation_config.json cannot be read"),
    ],
)
def test_a_broken_file_is_named_in_one_line(folder: Path, name: str, content: str, message: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(InputError, match=message) as refusal:
        tokenizer_from_folder(folder)
    assert "\n" not in str(refusal.value)


def test_a_vocabulary_that_transformers_refuses_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"garbage")
    with pytest.raises(InputError, match=r"transformers makes no tokenizer of tokenizer\.model") as refusal:
        tokenizer_from_folder(tmp_path)
    assert "\n" not in str(refusal.value)
