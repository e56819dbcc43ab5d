"""Builds byte-level BPE from GGUF metadata (model `gpt2`). How text is cut into words is word_rules.py's."""

import tokenizers
from tokenizers import decoders, models, normalizers

from jaxllm.config.errors import InputError
from jaxllm.text.gguf_vocabulary import GGUFVocabulary
from jaxllm.text.word_rules import WordRule, find_word_rule


def word_rule(vocabulary: GGUFVocabulary) -> WordRule:
    """Finds the rule that the metadata names.

    Raises:
        InputError: the name is not known.
    """
    return find_word_rule(vocabulary.fields.get("tokenizer.ggml.pre"))


def build_byte_level(vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    """Builds the tokenizer without its added tokens.

    Raises:
        InputError: the word rule is not known, there are no merges, or one of them needs a token that is not there.
    """
    rule = word_rule(vocabulary)
    if "tokenizer.ggml.merges" not in vocabulary.fields:
        raise InputError("the GGUF metadata has no tokenizer.ggml.merges, which model 'gpt2' needs: convert it again")
    token_ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    merges = [_merge(rank, text, token_ids) for rank, text in enumerate(vocabulary.merges)]
    backend = tokenizers.Tokenizer(models.BPE(token_ids, merges, ignore_merges=rule.whole_words))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _merge(rank: int, text: str, token_ids: dict[str, int]) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if not (left in token_ids and right in token_ids and left + right in token_ids):
        raise InputError(
            f"the GGUF metadata tokenizer.ggml.merges[{rank}] is {text!r:.60}, which needs a missing token"
        )
    return left, right
