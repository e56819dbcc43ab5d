"""Words that must not be generated -> token ids. Knows a tokenizer and SamplingParams; no logits."""

from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer


def with_bad_word_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Fills in the token ids of `bad_words`, each as it begins a text and as it follows a space.

    As in vLLM, the spelling with the space counts only where it begins with another token and has as many.

    Raises:
        InputError: there is no tokenizer.
    """
    if not params.bad_words or params.bad_word_token_ids:
        return params
    if tokenizer is None:
        raise InputError("bad_words need a tokenizer, and skip_tokenizer_init is set: use logit_bias of -100 instead")
    spellings: list[tuple[int, ...]] = []
    for word in params.bad_words:
        plain, spaced = (
            tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
        )
        if plain:
            spellings.append(plain)
        if spaced and len(spaced) == len(plain) and spaced[0] != plain[0]:
            spellings.append(spaced)
    return params.replace(bad_word_token_ids=tuple(spellings))
