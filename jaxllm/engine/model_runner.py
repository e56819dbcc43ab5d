"""Owns the device's arrays: weights, KV cache, row state. Knows packed inputs and executables; no requests."""

import functools
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxllm.engine.input_builder import PackedStep
from jaxllm.engine.step import RowState, StepProgram, make_logits
from jaxllm.engine.step_compiler import StepCompiler
from jaxllm.models.forward import Weights


class PendingTokens(Protocol):
    """A launched step's answer, still on its way."""

    def read(self) -> list[int]:
        """Waits for the step; gives one token per padded row. Raises what the step raised."""
        ...


class Runner(Protocol):
    """What the engine asks of whatever runs its steps."""

    def execute(self, step: PackedStep) -> PendingTokens:
        """Launches a step and returns at once."""
        ...

    def reset(self) -> None:
        """Makes new, empty device state after a step failed."""
        ...


class DeviceTokens:
    """Sampled tokens on the device, whose copy to the host has begun."""

    def __init__(self, tokens: jax.Array):
        tokens.copy_to_host_async()
        self._tokens = tokens

    def read(self) -> list[int]:
        return np.asarray(self._tokens).tolist()


class ModelRunner:
    """Runs steps in the order given. KV and rows are donated to each step; nobody else may hold a view of them."""

    def __init__(self, compiler: StepCompiler, weights: Weights):
        self.weights = weights
        self._compiler = compiler
        self.reset()

    @property
    def program(self) -> StepProgram:
        return self._compiler.program

    def reset(self) -> None:
        """Makes an empty cache and row state. The pool starts as zeros: a masked score of 0 x NaN would be NaN."""
        self._kv = self._rows = None  # the old arrays go first: there may not be room for both
        shape, dtype = self.program.kv_shape(self._compiler.num_blocks), jnp.dtype(self.program.decoder.cfg.dtype)
        kv_sharding = self.program.sharding(self.program.kv_spec())
        self._kv = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=kv_sharding)()
        self._rows = RowState(self._to_device(np.zeros(self._compiler.num_rows + 1, np.int32)))

    def execute(self, step: PackedStep) -> DeviceTokens:
        """Launches a step, compiling its shape first where that has not happened yet."""
        compiled = self._compiler.get(step.shape)
        if step.copies:
            self._copy_blocks(step.copies)
        tokens, self._kv, self._rows = compiled(self.weights, self._kv, self._rows, self._to_device(step.packed))
        return DeviceTokens(tokens)

    def logits(self, step: PackedStep) -> np.ndarray:
        """Runs a step for its logits [T, V] (float32) instead of its tokens; the KV is written all the same."""
        function = jax.jit(make_logits(self.program, step.shape), donate_argnums=(1, 2))
        logits, self._kv, self._rows = function(self.weights, self._kv, self._rows, self._to_device(step.packed))
        return np.asarray(logits)

    def close(self) -> None:
        """Drops the device's arrays."""
        self._kv = self._rows = None
        self.weights = {}

    def _copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copies whole blocks in all layers, in the device's order before the step; padded with block 0 onto itself."""
        padded = np.zeros((2, 1 << (len(copies) - 1).bit_length()), np.int32)
        padded[:, : len(copies)] = np.asarray(copies).T
        self._kv = _copy_blocks(self._kv, self._to_device(padded))

    def _to_device(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, self.program.sharding(PartitionSpec()))


@functools.partial(jax.jit, donate_argnums=0)
def _copy_blocks(kv: jax.Array, from_to: jax.Array) -> jax.Array:
    return kv.at[:, from_to[1]].set(kv[:, from_to[0]])
