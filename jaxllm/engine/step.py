"""The traced step: inputs -> tokens or logits, one shard_map over the mesh. Knows arrays; no requests, no sampling.

What the host makes or reads has a leading axis of the data ranks; a traced function sees its own rank's part only.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.engine.buckets import StepShape
from jaxllm.engine.step_inputs import StepInputs, unpack
from jaxllm.engine.vocab_ranks import gather, gather_by_sum, greedy_over_ranks
from jaxllm.kernels.all_reduce import reference
from jaxllm.mesh.axes import AxisRules
from jaxllm.models.forward import DecoderProgram, Weights, project, rope_tables, run_layers, weights_tree
from jaxllm.models.step_context import Kernels, StepContext


class OfRank(NamedTuple):
    """How an array of each data rank is split, in a tree of specs: from outside they are one, stacked by rank."""

    spec: PartitionSpec = PartitionSpec()

    @property
    def stacked(self) -> PartitionSpec:
        return PartitionSpec("data", *self.spec)


_OWN = OfRank()
PEERS = OfRank(PartitionSpec("tensor"))  # of the words of a PeerMemory


class RowState[A](NamedTuple):
    """What the device remembers of a rank's rows between steps; the last row is the spare one of padding."""

    last_token: A  # [rows + 1] int32


class StepProgram(NamedTuple):
    """All that a step is traced from. Matrix products of float32 models run in full float32, also on a GPU."""

    decoder: DecoderProgram
    kernels: Kernels
    mesh: Mesh
    rules: AxisRules
    block_size: int
    kv_cache_dtype: str = "auto"  # the model's
    capture_collectives: bool = False  # as nodes of a GPU's graph; otherwise they part it into pieces

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def decoder_for(self, shape: StepShape) -> DecoderProgram:
        """The decoder as a step of this shape drives it; docs/adr/0003 has the measurements.

        On a GPU a decode step is unrolled, so that it is captured whole as one command buffer. Mixed steps are scanned:
        they are long beside their launches, and compile faster.
        """
        unrolled = self.platform != "cpu" and shape.program == "decode"
        return self.decoder._replace(loop="unroll") if unrolled else self.decoder

    @property
    def writes_to_peers(self) -> bool:
        """Whether a kernel of our own adds up small parts over the ranks, in memory that the step is told of."""
        return self.kernels.all_reduce is not reference.all_reduce

    @property
    def num_groups(self) -> int:
        return len(self.decoder.cfg.kv_layout.windows)

    @property
    def num_ranks(self) -> int:
        """The data ranks; each has requests, rows and blocks of its own."""
        return self.mesh.shape["data"]

    def weight_specs(self) -> Weights:
        return weights_tree({spec.path: self.rules.spec(*spec.stored_axes) for spec in self.decoder.params})

    @property
    def kv_dtype(self) -> jnp.dtype:
        """The type in which keys and values are kept; bytes are e4m3 numbers."""
        return jnp.dtype(self.decoder.cfg.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype)

    def kv_spec(self) -> PartitionSpec:
        return self.rules.spec("layers", "kv_blocks", None, "kv_heads", None, "head_dim")

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        """The shape of the whole cache, of `num_blocks` blocks for each data rank."""
        cfg, total = self.decoder.cfg, self.num_ranks * num_blocks
        return (cfg.kv_layout.layers_per_group, total, 2, cfg.num_kv_heads, self.block_size, cfg.head_dim)

    def logits_spec(self) -> OfRank:
        """How the logits of a rank's requests are split."""
        return OfRank(self.rules.spec(None, "vocab"))

    @property
    def logits_width(self) -> int:
        """The vocabulary, in parts of one size for each tensor rank; what is behind the last token is -inf."""
        num_ranks = self.mesh.shape["tensor"]
        return -(-self.decoder.cfg.vocab_size // num_ranks) * num_ranks

    def sharding(self, spec: PartitionSpec | OfRank) -> NamedSharding:
        return NamedSharding(self.mesh, spec.stacked if isinstance(spec, OfRank) else spec)

    def of_rank(self, shape: tuple[int, ...], dtype: Any, spec: OfRank = _OWN) -> jax.ShapeDtypeStruct:
        """An array of each rank, as it is passed to a compiled program."""
        return jax.ShapeDtypeStruct((self.num_ranks, *shape), dtype, sharding=self.sharding(spec))


def make_step(program: StepProgram, shape: StepShape) -> Callable:
    """Gives step(weights, kv, rows, packed, peers), to be jitted with kv donated, by what the shape's variant asks for.

    "greedy": (tokens [B], kv, rows), rows donated too. "logits": (logits [B, V] of each request's last token, kv), with
    each tensor rank's part of the vocabulary. "hidden": (these logits, hidden states [T, D] of all tokens, kv).
    `peers` are the words of a PeerMemory, or None.
    """
    kv_spec, own, logits_spec = program.kv_spec(), OfRank(), program.logits_spec()

    def step(
        weights: Weights, kv: jax.Array, rows: RowState[jax.Array], packed: jax.Array, peers: jax.Array | None = None
    ):
        inputs = unpack(packed, shape, program.num_groups)
        kernels = _told(program, peers)
        hidden_TD, kv = _hidden(program, kernels, program.decoder_for(shape), weights, kv, rows, inputs)
        last_B = jnp.maximum(inputs.query_start[1:] - 1, 0)
        logits_BV = project(program.decoder, kernels, weights, hidden_TD[last_B])
        if shape.variant == "hidden":
            return logits_BV, hidden_TD, kv
        if shape.variant == "logits":
            return logits_BV, kv
        joins = functools.partial(gather_by_sum, kernels.all_reduce) if program.writes_to_peers else gather
        tokens_B = greedy_over_ranks(logits_BV, joins)
        spare = rows.last_token.shape[0] - 1
        target_B = jnp.where(inputs.samples == 1, inputs.row, spare)
        return tokens_B, kv, RowState(rows.last_token.at[target_B].set(tokens_B))

    outputs = {
        "greedy": (own, kv_spec, RowState(own)),
        "logits": (logits_spec, kv_spec),
        "hidden": (logits_spec, own, kv_spec),
    }
    return over_mesh(program, shape.label, step, _inputs(program), outputs[shape.variant])


def make_logits(program: StepProgram, shape: StepShape) -> Callable:
    """Gives the step that answers with the logits [T, V] of every token instead, for tests: (logits, kv).

    As in `make_step` they are split over the vocabulary, and may have columns of no token behind the last.
    """

    def logits(
        weights: Weights, kv: jax.Array, rows: RowState[jax.Array], packed: jax.Array, peers: jax.Array | None = None
    ):
        inputs = unpack(packed, shape, program.num_groups)
        kernels = _told(program, peers)
        hidden_TD, kv = _hidden(program, kernels, program.decoder_for(shape), weights, kv, rows, inputs)
        return project(program.decoder, kernels, weights, hidden_TD), kv

    return over_mesh(program, "logits", logits, _inputs(program), (program.logits_spec(), program.kv_spec()))


def _told(program: StepProgram, peers: jax.Array | None) -> Kernels:
    """The kernels; those that add up over the ranks know their peers, if there are any."""
    if peers is None:
        return program.kernels
    names = ("all_reduce", "linear_all_reduce")
    told = {name: functools.partial(getattr(program.kernels, name), peers=peers[0]) for name in names}
    return program.kernels._replace(**told)


def _hidden(
    program: StepProgram,
    kernels: Kernels,
    decoder: DecoderProgram,
    weights: Weights,
    kv: jax.Array,
    rows: RowState[jax.Array],
    inputs: StepInputs[jax.Array],
):
    token_T = jnp.where(inputs.token < 0, rows.last_token[inputs.row[inputs.request]], inputs.token)
    position_T = jnp.maximum(inputs.position, 0)
    cos, sin = rope_tables(program.decoder.cfg, position_T)
    block_GT = inputs.block_table[:, inputs.request, position_T // program.block_size]
    context = StepContext(
        cos=cos,
        sin=sin,
        write_block=jnp.where(inputs.position < 0, 0, block_GT),
        write_offset=position_T % program.block_size,
        block_table=inputs.block_table,
        query_start=inputs.query_start,
        context_len=inputs.context_len,
    )
    return run_layers(decoder, kernels, weights, kv, token_T, context)


def _inputs(program: StepProgram) -> tuple:
    peers = (PEERS,) if program.writes_to_peers else ()
    return (program.weight_specs(), program.kv_spec(), RowState(OfRank()), OfRank(), *peers)


def over_mesh(program: StepProgram, name: str, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
    """Runs a function on every device of the mesh, under settings that do not depend on the caller's.

    The compiled program is called `jit_<name>`, in a trace of the profiler too.
    """
    # Settings are given inside the traced function: they are thread-local, and the caller's own may differ. float32
    # on an H200 would otherwise be TF32.
    precision = "highest" if program.decoder.cfg.dtype == "float32" else "default"

    def with_settings(*arguments):
        with (
            jax.default_matmul_precision(precision),
            jax.numpy_rank_promotion("allow"),
            jax.numpy_dtype_promotion("standard"),
        ):
            own = _for_each_of_rank(lambda array: array[0], in_specs, arguments)
            return _for_each_of_rank(lambda array: array[None], out_specs, function(*own))

    with_settings.__name__ = name
    stacked = [
        jax.tree.map(lambda spec: spec.stacked if isinstance(spec, OfRank) else spec, specs, is_leaf=_is_spec)
        for specs in (in_specs, out_specs)
    ]
    return jax.shard_map(with_settings, mesh=program.mesh, in_specs=stacked[0], out_specs=stacked[1], check_vma=False)


def _for_each_of_rank(change: Callable[[jax.Array], jax.Array], specs: Any, arrays: Any) -> Any:
    """Changes the arrays below each OfRank in a tree of specs, which may be a prefix of the arrays' tree."""
    return jax.tree.map(
        lambda spec, below: jax.tree.map(change, below) if isinstance(spec, OfRank) else below,
        specs,
        arrays,
        is_leaf=_is_spec,
    )


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec | OfRank)
