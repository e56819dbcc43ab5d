import shutil
from pathlib import Path

import pytest

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint import resolve
from jaxllm.models.checkpoint.gguf_file import GGUFFile
from jaxllm.models.checkpoint.resolve import DEFAULT_MODEL, default_served_name, open_checkpoint
from jaxllm.models.checkpoint.safetensors_folder import SafetensorsFolder

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def no_hub(monkeypatch):
    """A test that asks the hub fails."""

    def download(repo: str, *_: object) -> Path:
        raise AssertionError(f"the hub was asked for {repo}")

    monkeypatch.setattr(resolve, "download", download)


def test_the_default_model_opens():
    checkpoint = open_checkpoint(DEFAULT_MODEL)
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.path.suffix == ".gguf"


def test_a_folder_opens_by_what_it_holds(tmp_path, write_gguf, no_hub):
    assert isinstance(open_checkpoint(str(GOLDEN / "llama")), SafetensorsFolder)
    path = write_gguf()
    assert isinstance(open_checkpoint(str(path)), GGUFFile)
    opened = open_checkpoint(str(tmp_path))
    assert isinstance(opened, GGUFFile)
    assert opened.path == path
    shutil.copy(path, tmp_path / "other.gguf")
    with pytest.raises(InputError, match=r"holds 2 GGUF files and no config.json: name one, such as .*model\.gguf"):
        open_checkpoint(str(tmp_path))
    shutil.copytree(GOLDEN / "llama", tmp_path, dirs_exist_ok=True)
    assert isinstance(open_checkpoint(str(tmp_path)), SafetensorsFolder)


def test_an_empty_folder_is_no_model(tmp_path, no_hub):
    with pytest.raises(InputError, match=r"has no config\.json"):
        open_checkpoint(str(tmp_path))


def test_a_packaged_name_wins_over_a_folder_which_is_reached_as_a_path(tmp_path, monkeypatch, no_hub):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "llama", tmp_path / "smollm2")
    assert isinstance(open_checkpoint("smollm2"), GGUFFile)
    assert isinstance(open_checkpoint("./smollm2"), SafetensorsFolder)


def test_a_tilde_is_the_users_home(tmp_path, monkeypatch, no_hub):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(GOLDEN / "llama", tmp_path / "llama")
    assert open_checkpoint("~/llama").path == tmp_path / "llama"


@pytest.mark.parametrize(
    "model", ["", "llama", "/no/such/folder", "./a/b", "../b", "~/none", "~none", "a/b/c", "org/file.gguf", "a b/c"]
)
def test_a_name_that_cannot_be_of_the_hub_is_refused_without_asking_it(no_hub, model):
    with pytest.raises(
        InputError, match=r"neither a folder nor a file here, nor a hub id.*smollm2, gemma3-270m"
    ) as raised:
        open_checkpoint(model)
    assert "\n" not in str(raised.value)


def test_one_file_of_a_folder_points_at_the_folder(no_hub):
    for file in ("config.json", "model.safetensors"):
        with pytest.raises(InputError, match=f"{file} is one file of a model: name its folder, {GOLDEN / 'llama'}"):
            open_checkpoint(str(GOLDEN / "llama" / file))
    with pytest.raises(InputError, match="not a GGUF file"):
        open_checkpoint(__file__)


def test_a_name_too_long_for_a_path_is_one_line(no_hub):
    with pytest.raises(InputError, match=r"neither a folder nor a file here|cannot read"):
        open_checkpoint("x" * 5000)


def test_a_hub_id_is_passed_to_the_hub(monkeypatch):
    asked = []

    def download(*arguments: object) -> Path:
        asked.append(arguments)
        return GOLDEN / "llama"

    monkeypatch.setattr(resolve, "download", download)
    checkpoint = open_checkpoint("meta-llama/Llama-3.2-1B", "v1", "/models", "hf_x")
    assert isinstance(checkpoint, SafetensorsFolder)
    assert asked == [("meta-llama/Llama-3.2-1B", "v1", "/models", "hf_x")]


@pytest.mark.parametrize("model", ["smollm2", str(GOLDEN / "llama"), __file__])
def test_only_hub_models_have_revisions(no_hub, model):
    with pytest.raises(InputError, match=r"revision v1 of .*: only a model of the hub has revisions"):
        open_checkpoint(model, revision="v1")


def test_the_served_name_is_what_the_user_called_the_model():
    assert default_served_name("./models/mine") == "./models/mine"
    assert default_served_name("org/name") == "org/name"
