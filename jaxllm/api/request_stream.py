"""One request's way from token ids to text: RequestUpdates in, OutputDeltas out. Knows no engine and no event loop."""

import time

from jaxllm.api.errors import RequestError
from jaxllm.api.logprobs import LogprobWriter, PromptLogprobs
from jaxllm.api.metrics import RequestMeter
from jaxllm.api.outputs import CompletionOutput, OutputDelta, RequestMetrics, RequestOutput
from jaxllm.api.prompts import TokenizedPrompt
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.messages import sample_ids
from jaxllm.engine.scores import RequestScores
from jaxllm.scheduler.request import RequestUpdate, WeightVersion
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.token_texts import TokenTexts
from jaxllm.text.tokenizer import Tokenizer


class _SampleStream:
    """Detokenizes one sample as its tokens come and ends it at a stop string, which only the text shows."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None, texts: TokenTexts | None):
        self.index = index
        self.finish_reason: str | None = None
        self.num_cached_tokens = 0
        self.runs_in_engine = True
        self.token_ids: list[int] = []
        self._stop_reason: int | str | None = None
        self._detokenizer = Detokenizer(tokenizer, params)
        self._writer = LogprobWriter(texts if params.detokenize else None, params.flat_logprobs)
        is_scored = params.logprobs is not None or params.logprob_token_ids is not None
        self._logprobs = self._writer.container() if is_scored else None
        self._cumulative = 0.0 if is_scored else None
        self._versions: list[tuple[WeightVersion, int]] = []

    def take(self, update: RequestUpdate) -> OutputDelta:
        """Turns what a step brought into what is new: nothing past a stop string."""
        ended = update.finish_reason is not None
        if ended:
            self.runs_in_engine = False
        if self.finish_reason is not None:
            return OutputDelta(index=self.index)
        if update.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = update.num_cached_tokens
        stopped_by_token = update.finish_reason == "stop" and update.stop_reason is not None
        text = self._detokenizer.push(update.token_ids, finished=ended, drop_last=stopped_by_token)
        self.finish_reason, self._stop_reason = update.finish_reason, update.stop_reason
        if text.stop is not None:
            self.finish_reason, self._stop_reason = "stop", text.stop
        new_ids = update.token_ids[: self._detokenizer.num_tokens_used - len(self.token_ids)]
        version = None
        if new_ids:
            version = update.weight_version
            if not self._versions or self._versions[-1][0] != version:
                self._versions.append((version, len(self.token_ids)))
        self.token_ids += new_ids
        logprobs = None
        if self._logprobs is not None:
            scores = update.scores.tokens[: len(new_ids)] if isinstance(update.scores, RequestScores) else ()
            logprobs = self._writer.container()
            self._writer.write(scores, logprobs)
            self._logprobs.extend(logprobs)
            assert self._cumulative is not None
            self._cumulative += sum(position.scores[0] for position in scores)
        return OutputDelta(
            text=text.text,
            token_ids=tuple(new_ids),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            num_output_tokens=len(self.token_ids),
            num_cached_tokens=self.num_cached_tokens,
            index=self.index,
            logprobs=logprobs,
            cumulative_logprob=self._cumulative,
            weight_version=version,
        )

    def output(self) -> CompletionOutput:
        """Everything so far."""
        return CompletionOutput(
            index=self.index,
            text=self._detokenizer.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self._cumulative,
            logprobs=None if self._logprobs is None else self._logprobs[:],
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            weight_version=self._versions[-1][0] if self._versions else None,
            weight_versions=list(self._versions),
        )


class RequestStream:
    """Follows a request with all its samples. It is finished when all of them are.

    A sample may end by its text while the engine still runs it: `take_left_over` names those, for the caller to abort.
    Tokens past the stop string are neither counted nor scored nor given out.
    """

    def __init__(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        texts: TokenTexts | None = None,
        meter: RequestMeter | None = None,
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.error: RequestError | None = None
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self._meter = meter
        self._samples = {
            name: _SampleStream(index, params, tokenizer, texts)
            for index, name in enumerate(sample_ids(request_id, params.n))
        }
        self._num_unfinished = len(self._samples)
        self._texts = texts if params.detokenize else None
        self._prompt_logprobs: PromptLogprobs | None = None
        self._version: WeightVersion | None = None

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """Ids under which the engine runs the samples."""
        return tuple(self._samples)

    @property
    def finished(self) -> bool:
        """Says whether nothing more will come."""
        return self._num_unfinished == 0

    def take(self, update: RequestUpdate) -> OutputDelta:
        """Turns what a step brought a sample into what is new for the user.

        Raises:
            RequestError: the step that the sample was in failed; the whole request ends with it.
        """
        sample = self._samples[update.request_id]
        if self.finished:
            sample.runs_in_engine = sample.runs_in_engine and update.finish_reason is None
            return OutputDelta(index=sample.index)
        if update.finish_reason == "error":
            sample.runs_in_engine = False
            self.error = RequestError(update.error or "the request failed")
            self.end("error")
            raise self.error
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = update.first_scheduled_time
        was_going_on = sample.finish_reason is None
        delta = sample.take(update)
        if delta.token_ids:
            self._version = delta.weight_version
            self.metrics.take_tokens(time.monotonic(), delta.num_output_tokens)
        if was_going_on and sample.finish_reason is not None:
            self._num_unfinished -= 1
            if self.finished:
                self.metrics.finished_time = time.monotonic()
        prompt = update.scores.prompt if isinstance(update.scores, RequestScores) else None
        if prompt is not None and self._prompt_logprobs is None:
            writer = LogprobWriter(self._texts, self.params.flat_logprobs)
            self._prompt_logprobs = writer.prompt_container()
            writer.write(prompt, self._prompt_logprobs)
            delta.prompt_logprobs = self._prompt_logprobs
        if self._meter is not None:
            self._meter.take(delta, self.metrics.time_in_queue, update.num_counted)
        return delta

    def end(self, reason: str) -> None:
        """Ends all samples that go on, from outside."""
        for sample in self._samples.values():
            sample.finish_reason = sample.finish_reason or reason
        self._num_unfinished = 0
        self.metrics.finished_time = self.metrics.finished_time or time.monotonic()
        if self._meter is not None:
            self._meter.end(reason)

    def take_left_over(self) -> tuple[str, ...]:
        """Gives the samples that have ended and still run in the engine, each of them once."""
        left = [
            name for name, sample in self._samples.items() if sample.runs_in_engine and sample.finish_reason is not None
        ]
        for name in left:
            self._samples[name].runs_in_engine = False
        return tuple(left)

    def output(self) -> RequestOutput:
        """Everything so far, as vLLM shapes it."""
        return self._shape([sample.output() for sample in self._samples.values()], self._prompt_logprobs)

    def delta_output(self, delta: OutputDelta) -> RequestOutput:
        """The same shape with only what came new."""
        completion = CompletionOutput(
            index=delta.index,
            text=delta.text,
            token_ids=list(delta.token_ids),
            cumulative_logprob=delta.cumulative_logprob,
            logprobs=delta.logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            weight_version=delta.weight_version,
            weight_versions=[] if delta.weight_version is None else [(delta.weight_version, 0)],
        )
        return self._shape([completion], delta.prompt_logprobs)

    def _shape(self, outputs: list[CompletionOutput], prompt_logprobs: PromptLogprobs | None) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=outputs,
            metrics=self.metrics,
            finished=self.finished,
            num_cached_tokens=next(iter(self._samples.values())).num_cached_tokens,  # others find what it computed
            prompt_logprobs=prompt_logprobs,
            weight_version=self._version,
        )
