import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.hub import download
from jaxllm.models.checkpoint.resolve import open_checkpoint

GOLDEN = Path(__file__).parents[2] / "golden"


def refuse(error: Exception):
    def snapshot_download(*_: object, **__: object) -> str:
        raise error

    return snapshot_download


def test_only_what_serving_needs_is_downloaded(monkeypatch, tmp_path):
    asked = {}

    def snapshot_download(repo: str, **options: object) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(InputError, match=r"org/name of the hub has no config\.json: of a GGUF repository"):
        download("org/name", None, None, None)
    (tmp_path / "config.json").touch()
    assert download("org/name", "v2", "/models", "hf_x") == tmp_path
    assert (asked["repo"], asked["revision"]) == ("org/name", "v2")
    assert (asked["cache_dir"], asked["token"]) == ("/models", "hf_x")
    wanted = [
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
    ]
    wanted += ["merges.txt", "model.safetensors.index.json"]
    unwanted = [
        "pytorch_model.bin",
        "model.gguf",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/m.safetensors",
    ]
    kept = filter_repo_objects(
        wanted + unwanted, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == wanted


def test_what_the_hub_said_becomes_one_line(monkeypatch):
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", refuse(OSError("401 Client Error.\n\nGated\trepo: log in."))
    )
    with pytest.raises(InputError) as raised:
        download("org/name", "main", None, None)
    assert str(raised.value) == (
        "org/name is neither a folder nor a file here, and the hub did not give it at revision main: "
        "401 Client Error. Gated repo: log in."
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse(RuntimeError()))
    with pytest.raises(InputError, match="did not give it: RuntimeError"):
        download("org/name", None, None, None)


def test_the_real_client_is_offline_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        InputError, match=r"org/name is neither a folder nor a file here, .*outgoing traffic has been disabled"
    ):
        download("org/name", None, str(tmp_path), None)


def test_a_model_in_the_hubs_cache_opens_offline(monkeypatch, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / commit).symlink_to(GOLDEN / "llama_tied")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    checkpoint = open_checkpoint("org/name", download_dir=str(tmp_path))
    assert checkpoint.config == json.loads((GOLDEN / "llama_tied" / "config.json").read_text())
    assert checkpoint.read("model.norm.weight", 0, 64).shape == (64,)
