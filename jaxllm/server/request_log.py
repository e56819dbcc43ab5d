"""A log line for each request, and one for what it was given, where the flags ask for them. Knows texts and records."""

import logging
from collections.abc import Sequence

from jaxllm.server.in_flight import RequestRecord, told_params
from jaxllm.server.prepare import PreparedRequest

logger = logging.getLogger(__name__)


class RequestLog:
    """Logs requests and outputs, each text cut to `max_len` characters."""

    def __init__(self, has_requests: bool = False, has_outputs: bool = False, max_len: int | None = None):
        self.has_outputs = has_outputs
        self._has_requests = has_requests
        self._max_len = max_len

    def begin(self, request: PreparedRequest) -> None:
        """Logs what a request asks for."""
        if self._has_requests:
            prompt = request.prompt
            shown = prompt.token_ids[: self._max_len] if prompt.text is None else prompt.text[: self._max_len]
            logger.info("request %s: prompt %r, params %r", request.request_id, shown, told_params(request.params))

    def end(self, record: RequestRecord, texts: Sequence[str] | None) -> None:
        """Logs what a request was given; of several samples the pieces as they came."""
        if texts is not None:
            shown = "".join(texts)[: self._max_len]
            logger.info(
                "request %s ended: %s after %d tokens: %r",
                *(record.request_id, record.finish_reason, record.num_output_tokens, shown),
            )
