"""Owns the device's arrays: weights, KV cache, row state. Knows packed inputs and executables; no requests."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.given_weights import take_weights
from jaxllm.engine.input_builder import PackedStep, PromptScoring
from jaxllm.engine.peer_memory import make_peer_memory
from jaxllm.engine.rank_arrays import Arriving, RankArrays
from jaxllm.engine.sampler import IN_PROMPT, Sampled, ScoreArrays
from jaxllm.engine.sampler_builder import PackedSampling
from jaxllm.engine.sampler_inputs import WHOLE_VOCABULARY
from jaxllm.engine.sampler_rows import CountReset
from jaxllm.engine.small_arrays import leave_holes
from jaxllm.engine.step import OfRank, RowState, StepProgram, make_logits, over_mesh
from jaxllm.engine.step_compiler import PromptScorerKey, StepCompiler
from jaxllm.mesh.adopt import Adopted
from jaxllm.mesh.caller import without_callers_mesh
from jaxllm.models.forward import Weights
from jaxllm.models.given import Params

SCORED_TILES = (16, 64, 256)  # tokens of prompts that are scored in one call


class StepScores(NamedTuple):
    """What a step told besides tokens: scores of the chosen tokens, and those of prompt tokens in launches' order.

    All arrays have a leading axis of the data ranks.
    """

    tokens: ScoreArrays[np.ndarray] | None
    prompt: tuple[ScoreArrays[np.ndarray], ...]

    def of_rank(self, rank: int) -> "StepScores":
        """Gives what concerns one data rank, without the leading axis of all of them."""
        return jax.tree.map(lambda array: array[rank], self)


class PendingTokens(Protocol):
    """A launched step's answer, still on its way."""

    def read(self) -> list[list[int]]:
        """Waits for the step; gives for each data rank one token per padded row. Raises what the step raised."""
        ...

    def read_scores(self) -> StepScores | None:
        """Waits likewise; gives what else was asked for, None for nothing."""
        ...


class Runner(Protocol):
    """What the engine asks of whatever runs its steps."""

    def execute(self, step: PackedStep) -> PendingTokens:
        """Launches a step and returns at once."""
        ...

    def reset(self) -> None:
        """Makes new, empty device state after a step failed."""
        ...

    @property
    def weights(self) -> Weights:
        """The tree of arrays that the model runs on."""
        ...

    def take_weights(self, params: Params, casts: bool = True) -> Adopted:
        """Gives weights to run on from what a caller's program holds; nothing changes yet.

        Raises:
            InputError: an array is missing, is not expected, or has another shape or type.
        """
        ...

    def set_weights(self, weights: Weights) -> None:
        """Runs on other arrays, as `take_weights` gives them, from the next step on."""
        ...


class DeviceTokens:
    """Sampled tokens and scores on the device, whose copies to the host have begun.

    Of several processes each reads those of its own data ranks.
    """

    def __init__(
        self,
        ranks: RankArrays,
        tokens: jax.Array,
        scores: ScoreArrays | None = None,
        prompt: Sequence[ScoreArrays] = (),
    ):
        arrays, self._tree = jax.tree.flatten((tokens, scores, tuple(prompt)))
        self._arriving = [ranks.begin(array) if isinstance(array, jax.Array) else array for array in arrays]

    def read(self) -> list[list[int]]:
        return self._read(self._arriving[0]).tolist()

    def read_scores(self) -> StepScores | None:
        return self.scores_of(self.leaves()) if len(self._arriving) > 1 else None

    def leaves(self) -> list[np.ndarray]:
        """Waits for everything, the tokens first."""
        return [self._read(array) for array in self._arriving]

    def scores_of(self, leaves: Sequence[np.ndarray]) -> StepScores | None:
        """Finds the scores among arrays in the order of `leaves`, whoever read them."""
        _, tokens, prompt = jax.tree.unflatten(self._tree, leaves)
        return None if tokens is None and not prompt else StepScores(tokens, prompt)

    def _read(self, array: Arriving | np.ndarray) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else array.read()


class ModelRunner:
    """Runs steps in the order given. KV and rows are donated to each step; nobody else may hold a view of them."""

    def __init__(self, compiler: StepCompiler, weights: Weights, largest_input: int = 0):
        """`largest_input` is the size in bytes of the largest packed step."""
        self._weights = weights
        self._compiler = compiler
        self._largest_input = largest_input
        self._fences: list[jax.Array] = []
        self.ranks = RankArrays(self.program)
        self.reset()

    @property
    def weights(self) -> Weights:
        """The tree of arrays that the model runs on."""
        return self._weights

    def take_weights(self, params: Params, casts: bool = True) -> Adopted:
        """Gives weights to run on from what a caller's program holds; `set_weights` goes over to them.

        Raises:
            InputError: an array is missing, is not expected, or has another shape or type.
        """
        return take_weights(self.program, params, casts=casts)

    def set_weights(self, weights: Weights) -> None:
        """Runs on other arrays, as `take_weights` gives them, from the next step on."""
        self._weights = weights

    @property
    def program(self) -> StepProgram:
        return self._compiler.program

    def program_texts(self) -> dict[str, Callable[[], str | None]]:
        """Gives for each compiled step, by its name in a trace, what reads its optimised program."""
        return self._compiler.texts()

    def reset(self) -> None:
        """Makes an empty cache and row state. The pool starts as zeros: a masked score of 0 x NaN would be NaN."""
        self._kv = self._rows = self._counts = self._peers = None  # old arrays go first: there may not be room for both
        with without_callers_mesh():
            self._make_state()

    def _make_state(self) -> None:
        shape, dtype = self.program.kv_shape(self._compiler.num_blocks), self.program.kv_dtype
        kv_sharding = self.program.sharding(self.program.kv_spec())
        self._kv = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=kv_sharding)()
        self._peers = make_peer_memory(self.program.mesh) if self.program.writes_to_peers else None
        self._rows = RowState(self.ranks.put(np.zeros((self.program.num_ranks, self._compiler.num_rows + 1), np.int32)))
        if self.program.platform != "cpu" and not self._fences:
            self._fences = leave_holes(
                self._largest_input, lambda hole: self.ranks.put(np.stack([hole] * self.program.num_ranks))
            )

    def execute(self, step: PackedStep) -> DeviceTokens:
        """Launches a step, compiling its shape first where that has not happened yet."""
        try:
            with without_callers_mesh():
                return self._launch(step)
        except Exception:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._weights)):
                raise RuntimeError(
                    "the weights were donated or deleted by the program that holds them: hand over the new ones with "
                    "update_params before anything runs"
                ) from None
            raise

    def _launch(self, step: PackedStep) -> DeviceTokens:
        forward = self._compiler.get(step.shape)
        if step.copies:
            self._copy_blocks(step.copies)
        arguments = (self._weights, self._kv, self._rows, self.ranks.argument(step.packed), *self._peer_words())
        if step.shape.variant == "greedy":
            tokens, self._kv, self._rows = forward(*arguments)
            return DeviceTokens(self.ranks, tokens)
        logits, *hidden, self._kv = forward(*arguments)
        prompt = self._score_prompt(hidden[0], step.prompt) if step.prompt else ()
        if step.sampling is None:  # prompts are scored, and none of them ends here
            none = np.zeros((self.program.num_ranks, step.shape.num_requests), np.int32)
            return DeviceTokens(self.ranks, self.ranks.put(none), None, prompt)
        sampled = self._sample(logits, step.sampling)
        return DeviceTokens(self.ranks, sampled.token, sampled.scores, prompt)

    def _peer_words(self) -> tuple[jax.Array, ...]:
        return () if self._peers is None else (self._peers.words,)

    def programs(self, step: PackedStep) -> list[Hashable]:
        """Lists the compiled programs that a step runs, by the compiler's keys."""
        keys: list[Hashable] = [step.shape]
        if step.prompt:
            sizes = dict.fromkeys(size for _, size in _tiles(step.prompt.index_and_token.shape[2]))
            keys += [PromptScorerKey(step.shape.num_tokens, size, step.prompt.num_best) for size in sizes]
        return [*keys, step.sampling.layout.shape] if step.sampling else keys

    def logits(self, step: PackedStep) -> np.ndarray:
        """Runs a step for its logits [R, T, V] (float32) instead of its tokens; the KV is written all the same."""
        function = jax.jit(make_logits(self.program, step.shape), donate_argnums=1)
        with without_callers_mesh():
            packed = self.ranks.argument(step.packed)
            logits, self._kv = function(self._weights, self._kv, self._rows, packed, *self._peer_words())
        return np.asarray(logits)[..., : self.program.decoder.cfg.vocab_size]

    def close(self) -> None:
        """Drops the device's arrays."""
        self._kv = self._rows = self._counts = self._peers = None
        self._weights, self._fences = {}, []

    def _sample(self, logits: jax.Array, sampling: PackedSampling) -> Sampled[jax.Array]:
        """Chooses tokens from logits, in the device's order behind the forward pass."""
        sampler = self._compiler.get_sampler(sampling.layout.shape)
        packed = self.ranks.argument(sampling.packed)
        if not sampling.layout.shape.penalties:
            sampled, self._rows = sampler(logits, self._rows, packed)
            return sampled
        for reset in sampling.count_resets:
            self._counts = self._count(self._token_counts(), *self._counted_tokens(reset))
        sampled, self._rows, self._counts = sampler(logits, self._rows, self._token_counts(), packed)
        return sampled

    def _token_counts(self) -> jax.Array:
        """The occurrences of each token in each row; made at first use, since most engines never need them."""
        if self._counts is None:
            counts = self.program.of_rank((self._compiler.num_rows + 1, self.program.decoder.cfg.vocab_size), jnp.int32)
            self._counts = jax.jit(lambda: jnp.zeros(counts.shape, counts.dtype), out_shardings=counts.sharding)()
        return self._counts

    def _counted_tokens(self, reset: CountReset) -> tuple[np.ndarray | jax.Array, ...]:
        """A row and the tokens of its prompt and output, padded to powers of four with a token that does not exist.

        The other data ranks count nothing, in their spare rows.
        """
        vocab_size, num_ranks = self.program.decoder.cfg.vocab_size, self.program.num_ranks

        def padded(token_ids: list[int]) -> np.ndarray | jax.Array:
            size = 64 << 2 * max(0, -(-((len(token_ids) - 1).bit_length() - 6) // 2))
            array = np.full((num_ranks, size), vocab_size, np.int32)
            array[reset.rank, : len(token_ids)] = token_ids
            return self.ranks.argument(array)

        row = np.full(num_ranks, self._compiler.num_rows, np.int32)
        row[reset.rank] = reset.row
        return self.ranks.argument(row), padded(reset.prompt_ids), padded(reset.output_ids)

    def _score_prompt(self, hidden: jax.Array, prompt: PromptScoring) -> list[ScoreArrays]:
        """Scores prompt tokens a tile at a time, so that few rows of logits exist at once."""
        scores, (num_tokens, total) = [], (hidden.shape[1], prompt.index_and_token.shape[2])
        for start, size in _tiles(total):
            part = prompt.index_and_token[:, :, start : start + SCORED_TILES[-1]]
            padded = np.zeros((*part.shape[:2], size), np.int32)
            padded[:, :, : part.shape[2]] = part
            scorer = self._compiler.get_prompt_scorer(num_tokens, size, prompt.num_best)
            told = scorer(self._weights, hidden, self.ranks.argument(padded))
            if prompt.num_best == WHOLE_VOCABULARY:  # as large as the logits: it leaves before the next is made
                told = jax.tree.map(lambda array: self.ranks.begin(array).read(), told)
            scores.append(told)
        return scores

    def _copy_blocks(self, copies: tuple[tuple[tuple[int, int], ...], ...]) -> None:
        """Copies whole blocks in all layers, in the device's order before the step; padded with block 0 onto itself."""
        size = 1 << (max(map(len, copies)) - 1).bit_length()
        padded = np.zeros((len(copies), 2, size), np.int32)
        for rank, pairs in enumerate(copies):
            padded[rank, :, : len(pairs)] = np.asarray(pairs, np.int32).reshape(-1, 2).T
        self._kv = self._copy(self._kv, self.ranks.argument(padded))

    @functools.cached_property
    def _copy(self) -> Callable:
        kv_spec = self.program.kv_spec()
        return jax.jit(
            over_mesh(self.program, "copy_blocks", _copy_blocks, (kv_spec, OfRank()), kv_spec), donate_argnums=0
        )

    @functools.cached_property
    def _count(self) -> Callable:
        return jax.jit(over_mesh(self.program, "count", _count, (OfRank(),) * 4, OfRank()), donate_argnums=0)


def _tiles(total: int) -> list[tuple[int, int]]:
    """Where each tile of scored tokens starts, and the size that it is padded to."""
    starts = range(0, total, SCORED_TILES[-1])
    return [
        (start, next(size for size in SCORED_TILES if size >= min(total - start, SCORED_TILES[-1]))) for start in starts
    ]


def _count(counts: jax.Array, row: jax.Array, prompt_ids: jax.Array, output_ids: jax.Array) -> jax.Array:
    none = jnp.zeros(counts.shape[1], jnp.int32)
    in_prompt = none.at[prompt_ids].set(IN_PROMPT, mode="drop")
    return counts.at[row].set(none.at[output_ids].add(1, mode="drop") + in_prompt)


def _copy_blocks(kv: jax.Array, from_to: jax.Array) -> jax.Array:
    return kv.at[:, from_to[1]].set(kv[:, from_to[0]])
