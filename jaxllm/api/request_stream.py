"""One request's way from token ids to text: RequestUpdates in, OutputDeltas out. Knows no engine and no event loop."""

import time

from jaxllm.api.errors import RequestError
from jaxllm.api.outputs import CompletionOutput, OutputDelta, RequestMetrics, RequestOutput
from jaxllm.api.prompts import TokenizedPrompt
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.scheduler.request import RequestUpdate
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.tokenizer import Tokenizer


class RequestStream:
    """Detokenizes a request as its tokens come and ends it at a stop string, which only the text shows.

    When `take` ends a request that the engine still runs (`stopped_by_text`), the caller aborts it there: tokens past
    the stop string are neither counted nor given out.
    """

    def __init__(self, request_id: str, prompt: TokenizedPrompt, params: SamplingParams, tokenizer: Tokenizer | None):
        self.request_id = request_id
        self.prompt = prompt
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self.finished = False
        self.stopped_by_text = False
        self._detokenizer = Detokenizer(tokenizer, params)
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._num_cached_tokens = 0

    def take(self, update: RequestUpdate) -> OutputDelta:
        """Turns what a step brought into what is new for the user.

        Raises:
            RequestError: the step that the request was in failed.
        """
        if self.finished:
            return OutputDelta()
        now = time.monotonic()
        if update.finish_reason == "error":
            self.finished, self._finish_reason = True, "error"
            raise RequestError(update.error or "the request failed")
        if update.token_ids:
            self.metrics.first_token_time = self.metrics.first_token_time or now
            self.metrics.last_token_time = now
        self._num_cached_tokens = max(self._num_cached_tokens, update.num_cached_tokens)
        stopped_by_token = update.finish_reason == "stop" and update.stop_reason is not None
        ended = update.finish_reason is not None
        text = self._detokenizer.push(update.token_ids, finished=ended, drop_last=stopped_by_token)
        self._finish_reason, self._stop_reason = update.finish_reason, update.stop_reason
        if text.stop is not None:
            self.stopped_by_text = not ended
            self._finish_reason, self._stop_reason = "stop", text.stop
        self.finished = self._finish_reason is not None
        used = self._detokenizer.num_tokens_used - len(self._token_ids)
        new_ids = update.token_ids[:used]
        self._token_ids += new_ids
        return OutputDelta(
            text=text.text,
            token_ids=tuple(new_ids),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            num_output_tokens=len(self._token_ids),
            num_cached_tokens=self._num_cached_tokens,
        )

    def output(self) -> RequestOutput:
        """Everything so far, as vLLM shapes it."""
        completion = CompletionOutput(
            index=0,
            text=self._detokenizer.text,
            token_ids=list(self._token_ids),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=[completion],
            metrics=self.metrics,
            finished=self.finished,
            num_cached_tokens=self._num_cached_tokens,
        )
