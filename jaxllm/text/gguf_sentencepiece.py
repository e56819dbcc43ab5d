"""Builds SentencePiece BPE from GGUF metadata (model `llama`): pieces with scores, unknown characters as bytes."""

import tokenizers
from tokenizers import decoders, models, normalizers

from jaxllm.config.errors import InputError
from jaxllm.text.gguf_vocabulary import GGUFVocabulary, TokenType

_SPACE_MARK = "▁"


def build_sentencepiece(vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    """Builds the tokenizer without its added tokens.

    Raises:
        InputError: there are no scores.
    """
    if not vocabulary.scores:
        raise InputError("the GGUF metadata has no tokenizer.ggml.scores, which model 'llama' needs: convert it again")
    token_ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.token_of("unknown") or next(
        (vocabulary.tokens[token_id] for token_id in vocabulary.ids_of(TokenType.UNKNOWN)), None
    )
    backend = tokenizers.Tokenizer(
        models.BPE(
            token_ids,
            merges_of_scores(vocabulary, token_ids),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=bool(vocabulary.ids_of(TokenType.BYTE)),
        )
    )
    mark = normalizers.Replace(" ", _SPACE_MARK)
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", default=True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), mark])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = mark
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_of_scores(vocabulary: GGUFVocabulary, token_ids: dict[str, int]) -> list[tuple[str, str]]:
    """Lists every pair of tokens that join into a normal one, the pairs of the best score first.

    SentencePiece joins the neighbours whose union scores best, the leftmost first. Pairs of one union have one score;
    they stay in the order of their cut, which matters only where two of them overlap in the text.
    """
    normal = vocabulary.ids_of(TokenType.NORMAL)
    normal.sort(key=vocabulary.scores.__getitem__, reverse=True)
    merges: list[tuple[str, str]] = []
    tokens = vocabulary.tokens
    for token_id in normal:
        token = tokens[token_id]
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in token_ids:
                right = token[cut:]
                if right in token_ids:
                    merges.append((left, right))
    return merges
