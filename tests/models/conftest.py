"""Checkpoints with random weights, and a whole prompt through the decoder in one step, without an engine around it."""

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec, SingleDeviceSharding
from safetensors.numpy import save_file

from jaxllm.kernels.select import select
from jaxllm.mesh.build import build_mesh
from jaxllm.models.config import ModelConfig
from jaxllm.models.family import Family
from jaxllm.models.forward import build_program, project, rope_tables, run_layers
from jaxllm.models.loader import check_tensors, load_weights
from jaxllm.models.registry import find_family
from jaxllm.models.step_context import Kernels, StepContext

BLOCK_SIZE = 8


class Tensors:
    """A checkpoint in memory."""

    format = "safetensors"
    path = Path("model")

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self.tensors = tensors
        self.config: dict[str, Any] = {}
        self.generation_config: dict[str, Any] = {}

    def names(self):
        return self.tensors

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        return self.tensors[name].dtype

    def read(self, name, start, stop, columns=None):
        return self.tensors[name][start:stop] if columns is None else self.tensors[name][start:stop, slice(*columns)]

    def tokenizer_fields(self):
        return None


class PromptRunner:
    """One model with its weights; its program is compiled once, since ropes come in as tables."""

    def __init__(self, family: Family, cfg: ModelConfig, tensors: Mapping[str, np.ndarray]):
        self.cfg, self._family, self._checkpoint = cfg, family, Tensors(tensors)
        program = build_program(cfg, "scan")
        device = SingleDeviceSharding(jax.devices()[0])
        self._weights = load_weights(
            program, self._checkpoint, family.pieces(cfg), jnp.dtype("float32"), lambda spec: device, progress=False
        )
        kernels = Kernels(*(select(name, platform="cpu") for name in Kernels._fields))

        def logits(weights, kv, token_T, step):
            hidden_TD, _ = run_layers(program, kernels, weights, kv, token_T, step)
            return project(program, kernels, weights, hidden_TD)

        whole = PartitionSpec()
        mapped = jax.shard_map(logits, mesh=build_mesh(), in_specs=whole, out_specs=whole, check_vma=False)
        # Compiled for one short run each: what takes the time is compiling.
        self._logits = jax.jit(mapped, compiler_options={"xla_backend_optimization_level": 0})

    def take(self, cfg: ModelConfig) -> None:
        """Goes on with a configuration that has other ropes, or says that it does not fit the weights."""
        check_tensors(self._checkpoint, self._family.pieces(cfg), cfg.num_layers, cfg.tie_embeddings)
        self.cfg = cfg

    def logits(self, prompt: list[int], length: int = 0) -> np.ndarray:
        """The logits [T, V] of a prompt, in a run whose contexts have at most `length` tokens."""
        cfg, width = self.cfg.at_length(length), -(-len(prompt) // BLOCK_SIZE)
        num_groups, position = len(cfg.kv_layout.windows), jnp.arange(len(prompt))
        table = 1 + jnp.arange(num_groups * width).reshape(num_groups, 1, width)
        cos, sin = rope_tables(cfg, position)
        step = StepContext(
            cos=cos,
            sin=sin,
            write_block=table[:, 0, position // BLOCK_SIZE],
            write_offset=position % BLOCK_SIZE,
            block_table=table,
            query_start=jnp.asarray([0, len(prompt)]),
            context_len=jnp.asarray([len(prompt)]),
        )
        shape = (cfg.kv_layout.layers_per_group, 1 + num_groups * width, 2, cfg.num_kv_heads, BLOCK_SIZE, cfg.head_dim)
        return np.asarray(self._logits(self._weights, jnp.zeros(shape), jnp.asarray(prompt), step))


@pytest.fixture(scope="session")
def prompt_runner() -> Callable[..., PromptRunner]:
    return PromptRunner


@pytest.fixture(scope="session")
def make_golden() -> ModuleType:
    """scripts/make_golden.py, whose configurations and random weights need no torch."""
    path = Path(__file__).parents[2] / "scripts" / "make_golden.py"
    spec = importlib.util.spec_from_file_location("make_golden", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def random_checkpoint(make_golden: ModuleType) -> Callable[..., tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Writes config.json and random weights of a configuration of make_golden, in the names that its family expects."""

    def write(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        config = make_golden.CONFIGS[name]
        family = find_family(config)[1]
        cfg = family.configure(config)
        shapes = {
            piece.name.format(l=l): piece.shape
            for parameter, pieces in family.pieces(cfg).items()
            for piece in pieces
            for l in range(cfg.num_layers if parameter.startswith("layers.") else 1)
        }
        tensors = make_golden.random_tensors(shapes, seed=0)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return config, tensors

    return write
