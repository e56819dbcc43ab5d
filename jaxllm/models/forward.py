"""Drives the decoder over one step's flat tokens. Knows how layers are stored and looped; no requests, no sampling.

`layer(x, kv, place, weights)` is written once, and driven by lax.scan (small programs, quick to compile) or by a Python
loop. Weights are stacked over the layers (few argument leaves), or their matrices are separate arrays, of which a scan
chooses (no copy on a CPU, where a slice of a stacked array is one). docs/adr/0003 has the measurements. Where a kernel
multiplies, it gets stacked matrices whole and finds the layer in them: a slice handed to it would be a copy.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.kernels.matmul import reference
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.parameters import LayerChoice, LayerMatrix, LayerVector
from jaxllm.models.step_context import Kernels, LayerPlace, StepContext

# {"embedding": {...}, "layers": {...}, "head": {...}}. A parameter of the layers is one stacked array, or
# {layer: array}; or "layers" is a tuple with a dictionary for each layer.
Weights = dict[str, Any]
LayerLoop = Literal["scan", "unroll"]

_NO_WINDOW = 1 << 30  # beyond every context, for layers without a window where windows are traced


class ParamSpec(NamedTuple):
    """One array of Weights: its path, the shape and logical axes of one layer, and which layers it holds.

    A stacked parameter holds `num_layers` of them; a separate one that of `layer`, whose number is in its path. Its
    role is "matrix", "norm" or "bias".
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    num_layers: int | None  # None where it is not stacked
    layer: int = 0
    role: str = "matrix"

    @property
    def name(self) -> str:
        return ".".join(key for key in self.path if isinstance(key, str))

    @property
    def layers(self) -> range:
        return range(self.layer, self.layer + (self.num_layers or 1))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape if self.num_layers is None else (self.num_layers, *self.shape)

    @property
    def stored_axes(self) -> tuple[str | None, ...]:
        return self.axes if self.num_layers is None else ("layers", *self.axes)


class DecoderProgram(NamedTuple):
    """The decoder without its arrays: what the step traces."""

    cfg: ModelConfig
    embedding: nnx.GraphDef
    layer: nnx.GraphDef
    head: nnx.GraphDef
    params: tuple[ParamSpec, ...]
    loop: LayerLoop


def build_program(
    cfg: ModelConfig, loop: LayerLoop = "scan", separate: bool = False, by_layer: bool = False
) -> DecoderProgram:
    """Splits the abstract decoder once into graph definitions and parameter specs; allocates nothing.

    With `separate`, the layers' matrices are arrays of their own instead of stacked ones; with `by_layer` all of their
    parameters are, in a tuple of layers.
    """
    decoder = nnx.eval_shape(lambda: Decoder(cfg, nnx.Rngs(0)))
    parts = {"embedding": decoder.embedding, "layers": decoder.layers[0], "head": decoder.head}
    graphs, params = {}, []
    for name, part in parts.items():
        graphs[name], state = nnx.split(part)
        for keys, variable in nnx.to_flat_state(state):
            path, shape, about = (name, *map(str, keys)), variable.shape, variable.get_metadata()
            axes, role = about["logical_axes"], about["role"]
            if name != "layers":
                params.append(ParamSpec(path, shape, axes, None, role=role))
            elif by_layer:
                keys = path[1:]
                params += [ParamSpec((name, l, *keys), shape, axes, None, l, role) for l in range(cfg.num_layers)]
            elif separate and role == "matrix":
                params += [ParamSpec((*path, l), shape, axes, None, l, role) for l in range(cfg.num_layers)]
            else:
                params.append(ParamSpec(path, shape, axes, cfg.num_layers, role=role))
    return DecoderProgram(cfg, graphs["embedding"], graphs["layers"], graphs["head"], tuple(params), loop)


def weights_tree(values: dict[tuple[str | int, ...], Any]) -> Weights:
    """Nests a {path: value} dictionary; layers by number become a tuple."""
    tree: Weights = {}
    for path, value in values.items():
        node: dict[Any, Any] = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    layers = tree.get("layers")
    if layers and 0 in layers:
        tree["layers"] = tuple(layers[l] for l in range(len(layers)))
    return tree


def run_layers(
    program: DecoderProgram,
    kernels: Kernels,
    weights: Weights,
    kv: Float[Array, "Lg P 2 K C H"],
    token_T: Int[Array, " T"],
    step: StepContext,
) -> tuple[Float[Array, "T D"], Float[Array, "Lg P 2 K C H"]]:
    """Embeds the tokens and takes them through all layers, writing their KV; gives the last hidden states."""
    x_TD = nnx.merge(program.embedding, weights["embedding"])(token_T, kernels)
    layers = weights["layers"]

    def layer(x_TD, kv, place, step, layer_weights):
        return nnx.merge(program.layer, layer_weights)(x_TD, kv, place, step, kernels)

    places, windows = _layer_places(program.cfg), [kind.window for kind in program.cfg.layer_kinds]
    plans = _plans(program.cfg, kernels, kv, x_TD, step)
    if program.loop == "scan" and not isinstance(layers, tuple):
        place_of = _places_by_layer(places)
        stacked = jax.tree.map(lambda w: None if _is_separate(w) else w, layers, is_leaf=_is_separate)
        plan_of = _choice(plans, windows)

        def scanned(carry, slices):
            x_TD, kv, l = carry
            own = jax.tree.map(
                lambda w, slice: LayerChoice(l, w) if _is_separate(w) else slice, layers, slices, is_leaf=_is_separate
            )
            own = _with_kernel(program, kernels, layers, own, l)
            return (*layer(x_TD, kv, place_of(l), step._replace(plan=plan_of(l)), own), l + 1), None

        # The layer's number is counted: one that a scan hands over is sliced from an array, a kernel in each layer.
        (x_TD, kv, _), _ = jax.lax.scan(scanned, (x_TD, kv, jnp.int32(0)), stacked, length=len(places))
        return x_TD, kv

    # Called, not repeated: layers of one kind are traced and lowered once, and XLA puts the calls in line.
    @functools.partial(jax.jit, static_argnames="place")
    def called(x_TD, kv, step, own, stacked, l, slot, place):
        if stacked is not None:
            own = _with_kernel(program, kernels, stacked, own, l)
        return layer(x_TD, kv, place._replace(slot=slot), step, own)

    for l, place in enumerate(places):
        if isinstance(layers, tuple):
            own, stacked = layers[l], None
        else:
            own, stacked = jax.tree.map(lambda w, l=l: w[l], layers, is_leaf=_is_separate), layers
        numbers = np.int32(l), np.int32(place.slot)
        planned = step._replace(plan=plans[windows[l]])
        x_TD, kv = called(x_TD, kv, planned, own, stacked, *numbers, place=place._replace(slot=0))
    return x_TD, kv


def _plans(cfg: ModelConfig, kernels: Kernels, kv, x_TD, step: StepContext) -> dict[int | None, Any]:
    """What attention prepares once for all layers with the same window: {window: plan}."""
    sizes = {"num_tokens": x_TD.shape[0], "table_width": step.block_table.shape[-1], "dtype": x_TD.dtype}
    plan = functools.partial(kernels.plan_attention, kv, step.query_start, step.context_len, **sizes)
    windows = dict.fromkeys(cfg.kv_layout.windows)
    return {window: plan(group=cfg.num_q_heads // cfg.num_kv_heads, window=window) for window in windows}


def _choice(plans: dict[int | None, Any], window_of_layer: list[int | None]) -> Callable[[Int[Array, ""]], Any]:
    """Gives the function from a traced layer to its plan; nothing is traced where all layers have the same."""
    if len(plans) == 1:
        return lambda l: plans[window_of_layer[0]]
    numbers = {window: i for i, window in enumerate(plans)}
    number_L = jnp.asarray([numbers[window] for window in window_of_layer], jnp.int32)
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *plans.values())
    return lambda l: jax.tree.map(lambda each: each[number_L[l]], stacked)


def _with_kernel(program: DecoderProgram, kernels: Kernels, layers: Any, own: Any, l: int | Int[Array, ""]) -> Any:
    """Gives a layer's parameters, the stacked ones with where they lie, for kernels that do not take slices."""
    if kernels.matmul is reference.matmul:
        return own
    roles = {s.path[1:]: s.role for s in program.params if s.path[0] == "layers" and s.num_layers}

    def placed(path, w, slice):
        role = None if _is_separate(w) else roles.get(tuple(key.key for key in path))
        if role == "matrix":
            return LayerMatrix(slice, w, l, kernels.matmul)
        return slice if role is None else LayerVector(slice, w, l)

    return jax.tree_util.tree_map_with_path(placed, layers, own, is_leaf=_is_separate)


def _is_separate(weight: object) -> bool:
    """Tells a parameter that is kept as {layer: array}."""
    return isinstance(weight, dict) and 0 in weight


def project(program: DecoderProgram, kernels: Kernels, weights: Weights, x_BD) -> Float[Array, "B V"]:
    """Hidden states -> float32 logits."""
    head = nnx.merge(program.head, weights["head"])
    return head(x_BD, weights["embedding"]["tokens"], kernels)


def rope_tables(cfg: ModelConfig, position_T: Int[Array, " T"]) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [R, T, H/2] of each rope at each position, times its attention factor, float32."""
    angles = [position_T.astype(jnp.float32)[:, None] * jnp.asarray(rope.inv_freq()) for rope in cfg.ropes]
    angle_RTH = jnp.stack(angles)
    factor_R11 = jnp.asarray([rope.attention_factor for rope in cfg.ropes], jnp.float32)[:, None, None]
    return jnp.cos(angle_RTH) * factor_R11, jnp.sin(angle_RTH) * factor_R11


def _layer_places(cfg: ModelConfig) -> list[LayerPlace]:
    layout = cfg.kv_layout
    return [LayerPlace(layout.group[l], layout.slot[l], k.window, k.rope) for l, k in enumerate(cfg.layer_kinds)]


def _places_by_layer(places: list[LayerPlace]) -> Callable[[Int[Array, ""]], LayerPlace]:
    """Gives the function from a traced layer to its place; fields in which no layers differ stay Python constants."""

    def field_of(values: list[Any], l: Int[Array, ""]) -> Any:
        if len(set(values)) == 1:
            return values[0]
        numbers = [_NO_WINDOW if value is None else value for value in values]
        return l if numbers == list(range(len(numbers))) else jnp.asarray(np.asarray(numbers, np.int32))[l]

    fields = [[getattr(place, field) for place in places] for field in LayerPlace._fields]
    return lambda l: LayerPlace(*(field_of(values, l) for values in fields))
