"""Drives the decoder over one step's flat tokens. Knows how layers are stored and looped; no requests, no sampling.

`layer(x, kv, place, weights)` is written once. Where the weights of all layers are stacked, it is driven by lax.scan
(small programs, quick to compile) or by a Python loop over static slices (not on a CPU: it copies every weight there).
Where they are separate arrays, a Python loop drives it. docs/adr/0003 has the measurements behind the default.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Decoder, Kernels, LayerPlace, StepContext

Weights = dict[str, Any]  # {"embedding": {...}, "layers": stacked {...} or a tuple of {...}, "head": {...}}
LayerLoop = Literal["scan", "unroll"]

_NO_WINDOW = 1 << 30  # beyond every context, for layers without a window where windows are traced


class ParamSpec(NamedTuple):
    """One parameter: its path in Weights, the shape and logical axes of one layer's array, and how many are stacked."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    num_layers: int | None  # None outside the layers

    @property
    def name(self) -> str:
        return ".".join(self.path)

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


def build_program(cfg: ModelConfig, loop: LayerLoop = "scan") -> DecoderProgram:
    """Splits the abstract decoder once into graph definitions and parameter specs; allocates nothing."""
    decoder = nnx.eval_shape(lambda: Decoder(cfg, nnx.Rngs(0)))
    parts = {"embedding": decoder.embedding, "layers": decoder.layers[0], "head": decoder.head}
    graphs, params = {}, []
    for name, part in parts.items():
        graphs[name], state = nnx.split(part)
        layers = cfg.num_layers if name == "layers" else None
        for path, variable in nnx.to_flat_state(state):
            axes = variable.get_metadata()["logical_axes"]
            params.append(ParamSpec((name, *map(str, path)), variable.shape, axes, layers))
    return DecoderProgram(cfg, graphs["embedding"], graphs["layers"], graphs["head"], tuple(params), loop)


def weights_tree(values: dict[tuple[str, ...], Any]) -> Weights:
    """Nests a {path: value} dictionary."""
    tree: Weights = {}
    for path, value in values.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
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
    x_TD = nnx.merge(program.embedding, weights["embedding"])(token_T)
    layers = weights["layers"]

    def layer(x_TD, kv, place, layer_weights):
        return nnx.merge(program.layer, layer_weights)(x_TD, kv, place, step, kernels)

    places = _layer_places(program.cfg)
    if program.loop == "scan" and not isinstance(layers, tuple):
        traced, static = _split_places(places)
        (x_TD, kv), _ = jax.lax.scan(
            lambda carry, xs: (layer(*carry, LayerPlace(**static, **xs[0]), xs[1]), None), (x_TD, kv), (traced, layers)
        )
        return x_TD, kv
    for l, place in enumerate(places):
        layer_weights = layers[l] if isinstance(layers, tuple) else jax.tree.map(lambda w, l=l: w[l], layers)
        x_TD, kv = layer(x_TD, kv, place, layer_weights)
    return x_TD, kv


def project(program: DecoderProgram, kernels: Kernels, weights: Weights, x_BD) -> Float[Array, "B V"]:
    """Hidden states -> float32 logits."""
    head = nnx.merge(program.head, weights["head"])
    return head(x_BD, weights["embedding"]["tokens"], kernels)


def rope_tables(cfg: ModelConfig, position_T: Int[Array, " T"]) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [R, T, H/2] of each rope at each position, float32."""
    angles = [position_T.astype(jnp.float32)[:, None] * jnp.asarray(rope.inv_freq()) for rope in cfg.ropes]
    angle_RTH = jnp.stack(angles)
    return jnp.cos(angle_RTH), jnp.sin(angle_RTH)


def _layer_places(cfg: ModelConfig) -> list[LayerPlace]:
    layout = cfg.kv_layout
    return [LayerPlace(layout.group[l], layout.slot[l], k.window, k.rope) for l, k in enumerate(cfg.layer_kinds)]


def _split_places(places: list[LayerPlace]) -> tuple[dict[str, jax.Array], dict[str, int | None]]:
    """Fields that differ between layers become [L] arrays to scan over; the others stay Python constants."""
    traced, static = {}, {}
    for field in LayerPlace._fields:
        values = [getattr(place, field) for place in places]
        if len(set(values)) == 1:
            static[field] = values[0]
        else:
            numbers = [_NO_WINDOW if value is None else value for value in values]
            traced[field] = jnp.asarray(np.asarray(numbers, np.int32))
    return traced, static
