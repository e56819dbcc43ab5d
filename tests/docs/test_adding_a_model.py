"""Follows docs/adding-a-model.md: its code, its config.json, and a checkpoint in the names that it gives."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm.config.errors import InputError
from jaxllm.models import registry


@pytest.fixture(scope="module")
def heron(
    docs: Path, blocks: Callable, run: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """What the page's code leaves behind, run beside the page's folder heron-tiny."""
    page = docs / "adding-a-model.md"
    place = tmp_path_factory.mktemp("model")
    (config,) = (block.text for block in blocks(page) if block.info == "json")
    (place / "heron-tiny").mkdir()
    (place / "heron-tiny" / "config.json").write_text(config)
    names: dict[str, Any] = {"place": place, "config": json.loads(config)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", {})
        patch.chdir(place)
        names["num_blocks"] = run(page, names)
        yield names


def tensors(names: dict[str, Any]) -> dict[str, np.ndarray]:
    """A checkpoint of small random numbers in the names and shapes of the page's family."""
    cfg, random = names["FAMILY"].configure(names["config"]), np.random.default_rng(0)
    return {
        piece.name.format(l=layer): random.normal(0, 0.2, piece.shape).astype(np.float32)
        for parameter, group in names["FAMILY"].pieces(cfg).items()
        for piece in group
        for layer in range(cfg.num_layers if parameter.startswith("layers.") else 1)
    }


def test_the_pages_code_generates_as_many_tokens_as_it_says(heron: dict[str, Any]):
    assert heron["num_blocks"] == 3  # what they print is compared with the page


def test_the_family_is_what_the_page_says_of_it(heron: dict[str, Any]):
    cfg = heron["FAMILY"].configure(heron["config"])
    assert [kind.window for kind in cfg.layer_kinds] == [16, 16, None]
    assert cfg.qk_norm == "head"
    assert "model.layers.2.self_attn.q_layernorm.weight" in tensors(heron)


def test_a_checkpoint_in_the_familys_names_loads_with_every_norm_in_its_place(heron: dict[str, Any]):
    from jaxllm import LLM

    checkpoint = tensors(heron)
    save_file(checkpoint, heron["place"] / "heron-tiny" / "model.safetensors")
    with LLM("heron-tiny", skip_tokenizer_init=True, num_gpu_blocks_override=32, enforce_eager=True) as llm:
        attention = llm._built.runner.weights["layers"]["attention"]
        for norm in ("q", "k"):
            names = [f"model.layers.{l}.self_attn.{norm}_layernorm.weight" for l in range(3)]
            np.testing.assert_array_equal(attention[f"{norm}_norm"]["scale"], [checkpoint[name] for name in names])


def test_a_tensor_that_the_family_does_not_name_is_refused(heron: dict[str, Any]):
    from jaxllm import LLM

    spare = {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    save_file({**tensors(heron), **spare}, heron["place"] / "heron-tiny" / "model.safetensors")
    with pytest.raises(InputError, match=r"1 tensor\(s\) that the configuration does not use: .*q_proj\.bias \(32,\)"):
        LLM("heron-tiny", skip_tokenizer_init=True, num_gpu_blocks_override=32)


def test_a_setting_that_the_family_does_not_implement_is_refused(heron: dict[str, Any]):
    with pytest.raises(InputError, match="attention_bias=True"):
        heron["FAMILY"].configure({**heron["config"], "attention_bias": True})
