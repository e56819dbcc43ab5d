import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config.engine_args import engine_args
from jaxllm.config.errors import InputError
from jaxllm.engine.model_source import find_model
from jaxllm.models.checkpoint import orbax_folder
from jaxllm.models.checkpoint.orbax_folder import OrbaxFolder
from jaxllm.models.checkpoint.resolve import open_checkpoint
from jaxllm.terminal import convert as command
from jaxllm.terminal.convert import convert, run


def converted(model, output, **options):
    convert(engine_args({"model": str(model), "use_tqdm_on_load": False, **options}), output, overwrite=True)
    return OrbaxFolder(output)


def test_the_arrays_are_the_decoders_with_the_values_of_the_checkpoint(golden, tmp_path, capsys):
    model = golden / "qwen3_bf16_sharded"
    folder, original = converted(model, tmp_path / "new" / "model"), open_checkpoint(str(model))
    assert capsys.readouterr().out.endswith(f"start with --model {tmp_path / 'new' / 'model'}\n")
    assert type(open_checkpoint(str(folder.path))) is OrbaxFolder
    assert (folder.config, folder.generation_config) == (original.config, original.generation_config)
    D, H = folder.config["hidden_size"], folder.config["head_dim"]
    N, K = folder.config["num_attention_heads"], folder.config["num_key_value_heads"]
    assert folder.shape("layers.1.attention.qkv_proj") == (D, K, N // K + 2, H)
    q, down = (
        original.read(f"model.layers.1.{x}_proj.weight", 0, n) for x, n in (("self_attn.q", N * H), ("mlp.down", D))
    )
    qkv = folder.read("layers.1.attention.qkv_proj", 0, D)
    assert qkv.dtype == q.dtype == jnp.bfloat16
    np.testing.assert_array_equal(qkv[:, :, :-2].reshape(D, -1).T, q)
    np.testing.assert_array_equal(folder.read("layers.1.mlp.down_proj", 3, 9, (5, 8)), down.T[3:9, 5:8])


@pytest.mark.slow
def test_a_converted_model_generates_what_the_original_does(golden, tmp_path):
    from jaxllm import LLM, SamplingParams

    copied = shutil.copytree(golden / "qwen3_bf16_sharded", tmp_path / "original")
    case = json.loads((copied / "golden.json").read_text())["cases"][2]
    converted(copied, tmp_path / "converted")
    shutil.rmtree(copied)
    options = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "num_gpu_blocks_override": 64}
    with LLM(str(tmp_path / "converted"), load_format="orbax", **options) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        (answer,) = llm.generate([case["prompt_ids"]], params, use_tqdm=False)
    assert list(answer.outputs[0].token_ids) == case["output_ids"][:8]


def test_the_tokenizer_comes_along(golden, tmp_path):
    model = Path(shutil.copytree(golden / "llama_tied", tmp_path / "model"))
    (model / "tokenizer.json").write_text("{}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("x")
    folder = converted(model, tmp_path / "converted")
    assert folder.tokenizer_fields() is None
    assert (folder.path / "tokenizer.json").read_text() == "{}"
    assert (folder.path / "additional_chat_templates" / "rag.jinja").read_text() == "x"
    assert not list(folder.path.glob("*.safetensors"))
    gguf = open_checkpoint("smollm2")
    command._write_tokenizer(gguf, folder.path)
    assert folder.tokenizer_fields() == gguf.tokenizer_fields()


def test_an_interrupted_write_leaves_what_was_there(golden, tmp_path, monkeypatch):
    converted(golden / "llama_tied", tmp_path / "model")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    written = orbax_folder.write_orbax

    def interrupted(folder, *arguments):
        written(folder, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(orbax_folder, "write_orbax", interrupted)
    for name in ("model", "another"):
        with pytest.raises(KeyboardInterrupt):
            converted(golden / "llama_tied", tmp_path / name)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert OrbaxFolder(tmp_path / "model").config == open_checkpoint(str(golden / "llama_tied")).config


def one_line(action):
    with pytest.raises(InputError) as raised:
        action()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_mistake_is_one_line(golden, tmp_path):
    model, output = str(golden / "llama_tied"), tmp_path / "out"
    assert one_line(lambda: run({"model": model})).startswith("output is missing")
    assert "no weights to convert" in one_line(lambda: run({"output": str(output), "load_format": "dummy"}))
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    assert "is not empty: name another folder, or add" in one_line(lambda: run({"model": model, "output": str(output)}))
    again = {"model": model, "output": str(output), "overwrite": True}
    assert "holds no model to overwrite" in one_line(lambda: run(again))
    assert "is a file" in one_line(lambda: run(again | {"output": str(output / "notes.txt")}))
    assert "cannot write" in one_line(lambda: run(again | {"output": str(output / "notes.txt" / "model")}))
    copied = shutil.copytree(model, tmp_path / "copied")
    itself = {"model": str(copied), "output": str(copied), "overwrite": True}
    assert "is the model itself" in one_line(lambda: run(itself))
    assert (output / "notes.txt").read_text() == "mine"


def test_a_folder_that_does_not_fit_or_is_damaged_is_refused(golden, tmp_path):
    folder = converted(golden / "llama_tied", tmp_path / "model").path
    wrong = {"model": str(folder), "load_format": "safetensors"}
    message = one_line(lambda: find_model(engine_args(wrong)))
    assert message == f"load_format=safetensors, but {folder} is a folder of the decoder's own arrays (orbax)"
    other = {"model": str(golden / "llama"), "load_format": "orbax"}
    assert "is a folder of safetensors" in one_line(lambda: find_model(engine_args(other)))
    opened = OrbaxFolder(folder)
    for file in (folder / "weights").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-100])
    message = one_line(lambda: opened.read("embedding.tokens", 0, 1))
    assert message.endswith("convert the model again")
    (folder / "weights" / "_METADATA").write_text("{")
    assert "convert the model again" in one_line(lambda: OrbaxFolder(folder))
