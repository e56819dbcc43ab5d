"""Makes a tiny checkpoint with random weights, and what transformers generates from it: a folder of tests/golden.

Needs torch and transformers, which the engine does not: run it where they are, `python scripts/make_golden.py cohere`.
Every token is chosen from a forward pass over the whole sequence, without a cache. A seed whose two best logits come
close at any step is passed over, so that rounding decides no token, and so is one whose texts repeat too few tokens.
"""

import argparse
import importlib.util
import json
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
PROMPT_LENGTHS = (1, 7, 16, 33, 64, 130)
NUM_TOKENS = 32
LEAST_GAP = 1.5e-3
LEAST_TOKENS = 6

_TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
_LLAMA = _TINY | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
# What turns is all that is new here: two layers show it.
_ROPE = _LLAMA | {"num_hidden_layers": 2, "rope_theta": 10000.0}
_GLM = _TINY | {
    "hidden_size": 48,
    "head_dim": 16,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
# config.json of each, as published checkpoints word it.
CONFIGS: dict[str, dict[str, Any]] = {
    "cohere": _TINY
    | {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "rope_theta": 20000.0,
        "use_qk_norm": True,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "cohere2": _TINY
    | {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "rope_theta": 20000.0,
        "sliding_window": 16,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
    },
    "glm": _GLM | {"architectures": ["GlmForCausalLM"], "model_type": "glm"},
    "glm4": _GLM | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"},
    "starcoder2": _TINY
    | {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "rope_theta": 100000.0,
        "sliding_window": 24,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    "falcon3": _LLAMA | {"hidden_size": 48, "head_dim": 32, "rope_theta": 1000042},
    "phi4_mini": _TINY
    | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 48,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
            "long_factor": [1.0, 1.5, 2.5, 5.0, 8.0, 10.0],
        },
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    "llama_yarn": _ROPE
    | {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
    "llama_linear": _ROPE | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_dynamic": _ROPE | {"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
}


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Weights for which every part of the model matters: norms around one, biases around zero, sharp attention."""
    tensors = {}
    for name, shape in shapes.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if name.endswith(".bias"):
            value = rng.normal(0.0, 0.3, shape)
        elif "norm" in name:
            value = rng.normal(1.0, 0.3, shape)
        elif "embed_tokens" in name or "lm_head" in name:
            value = rng.normal(0.0, 0.4, shape)
        else:
            value = rng.normal(0.0, 1.5 * shape[-1] ** -0.5, shape)
        tensors[name] = value.astype(np.float32)
    return tensors


def random_prompts(vocab_size: int) -> list[list[int]]:
    """The same prompts for every model of a vocabulary."""
    rng = np.random.default_rng(vocab_size)
    return [rng.integers(3, vocab_size, length).tolist() for length in PROMPT_LENGTHS]


def make(name: str, seed: int) -> dict[str, Any] | None:
    """Writes the checkpoint and gives its outputs; None where the seed will not do."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    fields = CONFIGS[name]
    # transformers reads the files that are kept here, as it reads a published checkpoint.
    with tempfile.TemporaryDirectory() as temporary:
        _write_config(Path(temporary), fields)
        config = transformers.AutoConfig.from_pretrained(temporary)
        # `parameters` gives a tied one once, under the name it is published with.
        parameters = transformers.AutoModelForCausalLM.from_config(config).named_parameters()
        tensors = random_tensors({key: tuple(value.shape) for key, value in parameters}, seed)
        _write_tensors(Path(temporary), tensors)
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            temporary, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    if wrong := {key: value for key, value in loading.items() if value}:
        raise SystemExit(f"{name}: transformers does not load what was written: {wrong}")
    model.eval()
    cases = [_continue(model, prompt) for prompt in random_prompts(config.vocab_size)]
    if min(min(case["top2_gap"]) for case in cases) < LEAST_GAP:
        return None
    if min(len(set(case["output_ids"])) for case in cases) < LEAST_TOKENS:
        return None
    if [case["output_ids"] for case in cases] != [
        _continue(model.double(), c["prompt_ids"])["output_ids"] for c in cases
    ]:
        return None
    _write_config(GOLDEN / name, fields)
    _write_tensors(GOLDEN / name, tensors)
    return {
        "family": name,
        "model_type": fields["model_type"],
        "dtype": "float32",
        "attn": "eager",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "decoding": "greedy",
        "seed": seed,
        "max_new_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "vocab_size": config.vocab_size,
        "num_params": sum(value.size for value in tensors.values()),
        "cases": cases,
    }


def _continue(model: Any, prompt: list[int]) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]

    ids, gaps, logprobs, first = list(prompt), [], [], None
    for _ in range(NUM_TOKENS):
        # Ropes that grow with the context remember the longest one: every pass begins with a new one.
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
        first = logits if first is None else first
        best = torch.topk(logits, 2)
        gaps.append(float(f"{best.values[0] - best.values[1]:.4g}"))
        logprobs.append(float(f"{torch.log_softmax(logits, -1)[best.indices[0]]:.6g}"))
        ids.append(int(best.indices[0]))
    assert first is not None
    return {
        "prompt_ids": prompt,
        "output_ids": ids[len(prompt) :],
        "logits_first": [float(f"{value:.6g}") for value in first],
        "logprobs": logprobs,
        "top2_gap": gaps,
    }


def _write_config(folder: Path, fields: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")


def _write_tensors(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Makes the named goldens with the first seed that will do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=[*CONFIGS, "all"], metavar="NAME", help=", ".join(CONFIGS))
    names = parser.parse_args().names
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("make_golden.py: torch is not installed here; run it where torch and transformers are")
    for name in CONFIGS if "all" in names else names:
        found = next(((seed, golden) for seed in range(100) if (golden := make(name, seed)) is not None), None)
        if found is None:
            raise SystemExit(f"{name}: no seed below 100 keeps two logits {LEAST_GAP} apart over {LEAST_TOKENS} tokens")
        (GOLDEN / name / "golden.json").write_text(json.dumps(found[1]) + "\n")
        gap = min(min(case["top2_gap"]) for case in found[1]["cases"])
        print(f"{name}: seed {found[0]}, {found[1]['num_params']:,} weights, smallest gap {gap}")


if __name__ == "__main__":
    main()
