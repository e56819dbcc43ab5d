"""What llama.cpp's converter does to each architecture's names, row order and values. Reads no file."""

from collections.abc import Mapping
from dataclasses import dataclass

_MODEL_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION_AND_MLP = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TWO_NORMS = {"ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """One value of general.architecture.

    `interleaved` names the modules whose rows go (0, half, 1, half + 1, ...) within each head; `norm_offset` is what
    was added to the weights of the norms.
    """

    layer_modules: Mapping[str, str]
    interleaved: frozenset[str] = frozenset()
    norm_offset: float = 0.0

    def hf_name(self, name: str) -> str | None:
        """Translates a tensor's name; None when the architecture has no such tensor."""
        module, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            return None
        if module in _MODEL_MODULES:
            return f"{_MODEL_MODULES[module]}.{suffix}"
        blk, layer, layer_module = (*module.split(".", 2), "", "")[:3]
        if blk != "blk" or not layer.isdecimal() or layer_module not in self.layer_modules:
            return None
        return f"model.layers.{layer}.{self.layer_modules[layer_module]}.{suffix}"

    def is_interleaved(self, name: str) -> bool:
        """Tells whether the tensor's rows must be put back in Hugging Face's order."""
        return name.split(".")[-2] in self.interleaved

    def offset(self, name: str) -> float:
        """Gives what must be subtracted from the tensor's values."""
        return self.norm_offset if name.endswith("norm.weight") else 0.0


_LLAMA = GGUFArchitecture(
    layer_modules={**_ATTENTION_AND_MLP, **_TWO_NORMS}, interleaved=frozenset({"attn_q", "attn_k"})
)

ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "qwen2": GGUFArchitecture(layer_modules={**_ATTENTION_AND_MLP, **_TWO_NORMS}),
    "qwen3": GGUFArchitecture(layer_modules={**_ATTENTION_AND_MLP, **_TWO_NORMS, **_QK_NORMS}),
    "gemma2": GGUFArchitecture(layer_modules={**_ATTENTION_AND_MLP, **_FOUR_NORMS}, norm_offset=1.0),
    "gemma3": GGUFArchitecture(layer_modules={**_ATTENTION_AND_MLP, **_FOUR_NORMS, **_QK_NORMS}, norm_offset=1.0),
    "phi3": GGUFArchitecture(
        layer_modules={
            **_TWO_NORMS,
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",  # gate above up, as in Hugging Face
            "ffn_down": "mlp.down_proj",
        }
    ),
}
