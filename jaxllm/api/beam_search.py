"""Beam search over requests of one token, whose forks share blocks by the prefix cache. Knows tokens and scores."""

from collections.abc import Callable, Sequence

from jaxllm.api.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from jaxllm.api.prompts import TokenizedPrompt
from jaxllm.config.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.engine.limits import EngineLimits
from jaxllm.text.tokenizer import Tokenizer

type Generate = Callable[[list[TokenizedPrompt], SamplingParams], list[RequestOutput]]


class BeamSearch:
    """The beams of one prompt. Each step forks every beam into its best candidates and keeps the best of all forks."""

    def __init__(self, prompt: TokenizedPrompt, params: BeamSearchParams, limits: EngineLimits):
        self.beams = [BeamSearchSequence(list(prompt.token_ids), [])]
        self._prompt = prompt
        self._completed: list[BeamSearchSequence] = []
        self._params = params
        self._end_ids = frozenset() if params.ignore_eos else frozenset(limits.eos_token_ids)
        self._max_tokens = min(len(prompt.token_ids) + params.max_tokens, limits.max_model_len)

    def prompts(self) -> list[TokenizedPrompt]:
        """What to ask next: one token behind each beam."""
        return [TokenizedPrompt(beam.tokens, None, self._prompt.cache_salt) for beam in self.beams]

    def fork(self, outputs: Sequence[RequestOutput]) -> None:
        """Takes the candidates behind each beam."""
        forks = []
        for beam, output in zip(self.beams, outputs, strict=True):
            logprobs = output.outputs[0].logprobs
            assert logprobs
            candidates = logprobs[0]
            for token_id, candidate in candidates.items():
                ends = token_id in self._end_ids
                kept = [] if ends and not self._params.include_stop_str_in_output else [token_id]
                fork = BeamSearchSequence(
                    tokens=beam.tokens + kept,
                    logprobs=[*beam.logprobs, candidates],
                    cum_logprob=beam.cum_logprob + candidate.logprob,
                    finish_reason="stop" if ends else None,
                    stop_reason=token_id if ends else None,
                )
                (self._completed if ends else forks).append(fork)
        self.beams = self._best(forks)
        if self.beams and len(self.beams[0].tokens) >= self._max_tokens:
            for beam in self.beams:
                beam.finish_reason = "length"
            self._completed += self.beams
            self.beams = []

    def result(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """Gives the best of all that ended, with their texts."""
        best = self._best(self._completed)
        for beam in best:
            beam.text = None if tokenizer is None else tokenizer.decode(beam.tokens)
        return BeamSearchOutput(best)

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        """The log-probability over a power of the length, which counts the prompt and not EOS, as in vLLM."""
        length = len(beam.tokens) - (beam.tokens[-1] in self._end_ids)
        return beam.cum_logprob / max(length, 1) ** self._params.length_penalty


def search_beams(
    prompts: Sequence[TokenizedPrompt],
    params: BeamSearchParams,
    limits: EngineLimits,
    generate: Generate,
    on_end: Callable[[], None],
) -> list[BeamSearch]:
    """Runs the searches side by side; `on_end` is called as each ends."""
    searches = [BeamSearch(prompt, params, limits) for prompt in prompts]
    one_token = SamplingParams(temperature=params.temperature, max_tokens=1, logprobs=2 * params.beam_width)
    while living := [search for search in searches if search.beams]:
        outputs = iter(generate([prompt for search in living for prompt in search.prompts()], one_token))
        for search in living:
            search.fork([next(outputs) for _ in search.beams])
            if not search.beams:
                on_end()
    return searches
