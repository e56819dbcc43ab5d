"""Log-probabilities of tokens as they travel from the engine to a front. Plain data: knows no device and no text."""

from typing import NamedTuple


class TokenScores(NamedTuple):
    """What was asked about one position: the token that stands there first, then the best ones, then those named.

    Parallel tuples; a token may come twice. A score is a natural log-probability, or what `logprobs_mode` says. The
    rank is 1 for the best token of the vocabulary; 0 where it is not known.
    """

    token_ids: tuple[int, ...]
    scores: tuple[float, ...]
    ranks: tuple[int, ...]


class RequestScores(NamedTuple):
    """What a step tells of one request besides its tokens.

    `tokens` has one entry for each new output token, or is empty if none was asked for. `prompt` comes once, with the
    first output token: one entry for each token of the prompt, None for the first one and for those before
    `prompt_logprob_start`.
    """

    tokens: tuple[TokenScores, ...] = ()
    prompt: tuple[TokenScores | None, ...] | None = None
