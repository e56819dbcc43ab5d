"""Cohere's Command-R7B and Command A: Command-R with a window and rope on three layers of four, neither on the rest."""

from collections.abc import Mapping

from jaxllm.models import hf_config, hf_rope
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.families.cohere import command_config
from jaxllm.models.family import Family, decoder_pieces
from jaxllm.models.hf_config import SLIDING
from jaxllm.models.rope import no_rope

# What Cohere's own files say besides, and what it must say.
_SETTINGS = {
    "use_qk_norm": False,
    "rotary_pct": 1.0,
    "use_parallel_block": True,
    "use_gated_activation": True,
    "use_embedding_sharing": True,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
}


def configure(hf: Mapping) -> ModelConfig:
    """Reads Command-R7B's config.json."""
    hf_config.refuse(hf, **_SETTINGS)
    hf = hf_config.Filled(hf, max_position_embeddings=8192, sliding_window=4096)
    n = hf.get("sliding_window_pattern") or hf.get("layer_switch") or 4
    types = hf_config.layer_types(hf, hf_config.every_nth_full(hf_config.num_layers(hf), n))
    window, rope = hf["sliding_window"], hf_rope.rope(hf, hf_config.head_dim(hf))
    kinds = tuple(LayerKind(window, 0) if kind == SLIDING else LayerKind(None, 1) for kind in types)
    ropes, longest = (rope, no_rope(rope.dim)), hf_rope.max_position(hf, rope)
    return command_config(hf, kinds, ropes=ropes, max_position=longest)


FAMILY = Family(configure, decoder_pieces)
