"""Finds the tokens at which a GGUF model stops. Knows names of such tokens, no model and no request."""

from jaxllm.text.gguf_vocabulary import GGUFVocabulary, TokenType

# Ends of a text, of a turn, of a message; the last three lead over to another file, or pad, in code models.
_FIELDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Files often name but one end, so that llama.cpp looks for the others by their text, as is done here.
_ALWAYS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<|fim_pad|>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<reponame>",
    "<|file_sep|>",
)
# In other vocabularies these are ordinary text, such as the tag that ends struck-out text in HTML.
_IF_CONTROL = ("</s>", "<eos>", "<EOT>", "[EOS]", "[EOT]")


def end_token_ids(vocabulary: GGUFVocabulary) -> list[int]:
    """Gives the ids of the tokens that end a generation, the file's own EOS first.

    Raises:
        InputError: the metadata names an id outside the vocabulary.
    """
    named = [vocabulary.token_id(field) for field in _FIELDS]
    wanted = {*_ALWAYS, *_IF_CONTROL}
    found = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if token in wanted}
    ends = [found[token] for token in _ALWAYS if token in found]
    ends += [
        found[token] for token in _IF_CONTROL if token in found and vocabulary.types[found[token]] == TokenType.CONTROL
    ]
    if {"<|return|>", "<|call|>", "<|end|>"} <= found.keys():  # there it only ends one message of several
        ends.remove(found["<|end|>"])
    return list(dict.fromkeys(token_id for token_id in (*named, *ends) if token_id is not None))
