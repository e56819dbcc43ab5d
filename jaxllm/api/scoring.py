"""Log-probabilities of given continuations: what follows what, and which scores to keep. Knows no model."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.api.errors import RequestError
from jaxllm.api.outputs import ContinuationScore, OutputDelta
from jaxllm.api.prompts import Prompt, TokenizedPrompt, tokenize_prompt
from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.scores import RequestScores
from jaxllm.scheduler.request import RequestUpdate
from jaxllm.text.tokenizer import Tokenizer

type Continuation = str | Sequence[int]

SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)


def pair_with(prompts: Sequence[Prompt], continuations: Sequence[Continuation]) -> list[tuple[Prompt, Continuation]]:
    """Gives each continuation its prompt: one for all, or one for each.

    Raises:
        InputError: there are several prompts, and not as many continuations.
    """
    if len(prompts) == 1:
        prompts = [prompts[0]] * len(continuations)
    if len(prompts) != len(continuations):
        raise InputError(
            f"there are {len(prompts)} prompts and {len(continuations)} continuations: give one prompt, or one each"
        )
    return list(zip(prompts, continuations, strict=True))


@dataclass(frozen=True, slots=True)
class Joined:
    """The ids of a prompt and its continuation, kept small: an evaluation has millions of them."""

    token_ids: array[int]
    num_context: int
    cache_salt: str | None

    def prompt(self) -> TokenizedPrompt:
        """Gives the ids as the engine takes them."""
        return TokenizedPrompt(self.token_ids.tolist(), None, self.cache_salt)


def join(prompt: Prompt, continuation: Continuation, tokenizer: Tokenizer | None) -> Joined:
    """Puts the ids of prompt and continuation together.

    Two texts are tokenized as one, spaces at the prompt's end counting to the continuation, as evaluations do it; the
    continuation is then what follows as many tokens as the prompt has alone.

    Raises:
        InputError: one of them is empty or malformed.
    """
    if isinstance(prompt, str) and isinstance(continuation, str) and tokenizer is not None:
        kept = prompt.rstrip()
        ids, salt = tokenizer.encode(prompt + continuation), None
        num_context = len(tokenizer.encode(kept)) if kept else len(tokenizer.encode(""))
    else:
        context = tokenize_prompt(prompt, tokenizer)
        if isinstance(continuation, str):
            if tokenizer is None:
                raise InputError("a continuation in text needs a tokenizer, and skip_tokenizer_init is set: give ids")
            own_ids = tokenizer.encode(continuation, add_special_tokens=False)
        else:
            own_ids = tokenize_prompt(continuation, tokenizer).token_ids
        ids, salt = context.token_ids + own_ids, context.cache_salt
        num_context = len(context.token_ids)
    if num_context == 0:
        raise InputError("the prompt is empty: the first token can't be scored; begin with the model's BOS token")
    if len(ids) <= num_context:
        raise InputError("the continuation is empty; it needs at least 1 token")
    try:
        return Joined(array("i", ids), num_context, salt)
    except OverflowError:
        raise InputError(f"token ids must be below 2^31, got {max(ids, key=abs)}") from None


class ScoreStream:
    """Takes the updates of one request for scores, and keeps those of the continuation only."""

    def __init__(self, request_id: str, joined: Joined):
        self.request_id = request_id
        self.prompt = joined.prompt()
        self.params = SCORED.replace(prompt_logprob_start=joined.num_context)
        self.error: RequestError | None = None
        self.score = ContinuationScore(self.prompt.token_ids[joined.num_context :], [], [])
        self._num_context = joined.num_context
        self._finished = False

    @property
    def sample_ids(self) -> tuple[str, ...]:
        return (self.request_id,)

    @property
    def finished(self) -> bool:
        return self._finished

    def take(self, update: RequestUpdate) -> OutputDelta:
        """Keeps the scores that an update brings."""
        if update.error is not None:
            self.error = RequestError(update.error)
        scores = update.scores
        if isinstance(scores, RequestScores) and scores.prompt is not None:
            for position in scores.prompt[self._num_context :]:
                assert position is not None
                self.score.logprobs.append(position.scores[0])
                self.score.ranks.append(position.ranks[0])
        self._finished = self._finished or update.finish_reason is not None
        return OutputDelta()

    def end(self, reason: str) -> None:
        self._finished = True

    def take_left_over(self) -> tuple[str, ...]:
        """Names the request when it was ended from outside."""
        return ()
