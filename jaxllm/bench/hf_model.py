"""The same model in transformers, for comparison. Knows torch and transformers, imported at use; generates nothing."""

import importlib.util
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.config.engine_args import DTYPES, EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.engine.model_source import ModelSource, find_model
from jaxllm.models.checkpoint.source import Checkpoint

CHECKPOINT_WEIGHTS = "the checkpoint's, as jaxllm reads them"
RANDOM_WEIGHTS = "random, others than jaxllm's"


@dataclass(frozen=True, slots=True)
class HFModel:
    """A transformers model on its device, and what is worth telling of it."""

    model: Any
    device: str
    max_model_len: int
    facts: dict[str, Any]


def check_torch() -> None:
    """Refuses to measure transformers where it cannot run.

    Raises:
        InputError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError("engine=hf needs torch, which is not installed here: install torch, or leave --engine out")


def load_hf_model(args: EngineArgs) -> HFModel:
    """Makes the model from the configuration that jaxllm reads, with the weights that jaxllm reads, or random ones.

    Raises:
        InputError: torch is not installed, or the model is not found.
    """
    check_torch()
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    transformers.logging.set_verbosity_error()
    start = time.perf_counter()
    source = find_model(args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = _dtype_name(args.dtype, str(source.hf_config.get("torch_dtype") or ""), device)
    torch.manual_seed(args.seed)
    # No token may end a request: each has exactly output_len of them.
    settings = {**source.hf_config, "eos_token_id": None, "pad_token_id": 0, "dtype": dtype}
    settings.pop("torch_dtype", None)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    model.eval().requires_grad_(False)
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    weights = _fill(model, source)
    return HFModel(
        model,
        device,
        args.max_model_len or config.max_position_embeddings,
        {
            "device": f"1 x {torch.cuda.get_device_name() if device == 'cuda' else 'cpu'} ({device})",
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "dtype": dtype,
            "weights": weights,
            "start_up_seconds": round(time.perf_counter() - start, 2),
        },
    )


def _dtype_name(wanted: str, stored: str, device: str) -> str:
    """Resolves auto as jaxllm's engine does."""
    if wanted != "auto":
        return DTYPES[wanted]
    if device == "cpu":
        return "float32"
    return "float16" if stored == "float16" else "bfloat16"


def _fill(model: Any, source: ModelSource) -> str:
    """Copies the checkpoint's tensors, dequantised, into the model; says what weights it has now."""
    if source.checkpoint is None:
        return RANDOM_WEIGHTS
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in source.checkpoint.names():
        if name in parameters:
            _copy(parameters.pop(name), source.checkpoint, name)
    tied = model.config.tie_word_embeddings and parameters.keys() <= {"lm_head.weight"}
    if parameters and not tied:
        raise InputError(f"transformers has a parameter {next(iter(parameters))} that {source.checkpoint.path} lacks")
    return CHECKPOINT_WEIGHTS


def _copy(parameter: Any, checkpoint: Checkpoint, name: str) -> None:
    import torch  # pyright: ignore[reportMissingImports]

    rows = checkpoint.shape(name)[0]
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.array(checkpoint.read(name, 0, rows), np.float32)))
