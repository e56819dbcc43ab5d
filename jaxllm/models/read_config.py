"""config.json -> ModelConfig, with nothing that changes the result left unread. Knows no family.

A key that the family does not read is harmless by name, or has the value that transformers takes when it is absent, or
is unknown to transformers too; any other is an error.
"""

import difflib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from jaxllm.config.errors import InputError
from jaxllm.models.config import ModelConfig
from jaxllm.models.family import Family

logger = logging.getLogger(__name__)

# Keys that no forward pass reads: where the file comes from, how the model was trained, how transformers runs it, and
# settings of generation, which have a file of their own.
_HARMLESS = frozenset(
    (
        *("_name_or_path", "architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype"),
        *("unsloth_fixed", "unsloth_version", "tokenizer_class", "prefix", "name_or_path", "problem_type"),
        *("id2label", "label2id", "num_labels", "task_specific_params", "finetuning_task", "initializer_range"),
        *("gradient_checkpointing", "router_aux_loss_coef", "attention_dropout", "hidden_dropout", "resid_pdrop"),
        *("embd_pdrop", "attn_pdrop", "residual_dropout", "embedding_dropout", "dropout", "classifier_dropout"),
        *("pretraining_tp", "use_cache", "cache_implementation", "return_dict", "output_attentions"),
        *("output_hidden_states", "torchscript", "use_bfloat16", "chunk_size_feed_forward", "pruned_heads"),
        *("use_flash_attn", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
        *("tie_encoder_decoder", "cross_attention_hidden_size", "decoder_start_token_id", "pad_token_id"),
        *("bos_token_id", "eos_token_id", "sep_token_id", "forced_bos_token_id", "forced_eos_token_id"),
        *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "do_sample", "temperature", "top_k", "top_p"),
        *("typical_p", "min_length", "max_length", "max_new_tokens", "num_beams", "num_beam_groups"),
        *("diversity_penalty", "early_stopping", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores", "return_dict_in_generate"),
        *("exponential_decay_length_penalty", "remove_invalid_values"),
    )
)
# Keys that transformers handles outside the model's own configuration, with the one value that asks for nothing.
_REFUSED: dict[str, object] = {
    "quantization_config": None,
    "compression_config": None,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "is_decoder": None,
}


class ReadFields(Mapping):
    """config.json that remembers which of its keys were asked for."""

    def __init__(self, hf: Mapping):
        self._hf = hf
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._hf[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hf)

    def __len__(self) -> int:
        return len(self._hf)


def read_config(family: Family, hf: Mapping, overridden: frozenset[str] = frozenset()) -> ModelConfig:
    """Reads a config.json with its family; `overridden` are the keys that the user changed.

    Raises:
        InputError: a key is missing or has a value that is not built, or one that changes the result would go unread;
            or nobody knows a key that the user changed.
    """
    fields = ReadFields(hf)
    cfg = family.configure(fields)
    unknown = _check_unread(hf, fields.read | family.harmless)
    if mistaken := sorted(overridden & unknown):
        near = difflib.get_close_matches(mistaken[0], fields.read, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"hf_overrides: {_named(hf)} does not read {mistaken[0]!r}{hint}")
    if unknown:
        keys = ", ".join(sorted(unknown))
        logger.info("config.json of %s: ignored %s, which transformers does not know either", _named(hf), keys)
    return cfg


def _check_unread(hf: Mapping, read: frozenset[str] | set[str]) -> frozenset[str]:
    """Gives the keys that nobody knows."""
    unread = {key: value for key, value in hf.items() if key not in read | _HARMLESS and value is not None}
    for key in unread.keys() & _REFUSED.keys():
        if unread.pop(key) not in (None, _REFUSED[key]):
            raise InputError(f"config.json: {key}={hf[key]!r:.80} is not supported for {_named(hf)}; leave it out")
    if not unread:
        return frozenset()
    defaults = _transformers_defaults(hf.get("model_type"))
    unknown = frozenset(key for key in unread if not hasattr(defaults, key))
    for key in sorted(unread.keys() - unknown):
        if unread[key] != getattr(defaults, key):
            default = getattr(defaults, key)
            raise InputError(
                f"config.json: {key}={unread[key]!r:.80} is not supported for {_named(hf)} (only {default!r})"
            )
    return unknown


def _named(hf: Mapping) -> str:
    return "/".join(hf.get("architectures") or ["this model"])


def _transformers_defaults(model_type: str | None) -> object:
    """An instance of transformers' configuration with every default; None for a model type that it does not know."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # a second that few configurations need

    return CONFIG_MAPPING[model_type]() if model_type is not None and model_type in CONFIG_MAPPING else None
