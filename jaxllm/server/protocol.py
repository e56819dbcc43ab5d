"""Bodies of requests, as OpenAI's clients send them, with vLLM's names for what OpenAI has not. Knows no engine."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, SkipValidation


class StreamOptions(BaseModel):
    """What a stream tells besides text."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What both kinds of completion share. None means the default; what is not named here is in `model_extra`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int = 0
    n: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    vllm_xargs: dict[str, Any] | None = None  # SamplingParams.extra_args: the parameters of logits processors, by name
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    request_id: str | None = None
    timeout: float | None = None  # seconds

    @property
    def num_logprobs(self) -> int | None:
        """How many of the best tokens are to be told at each position; None where no log-probability is."""
        return 0 if self.logprob_token_ids else None

    @property
    def wants_usage(self) -> bool:
        """Says whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Says whether each chunk of a stream tells the usage so far."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatTemplateFields(BaseModel):
    """What a chat template reads."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None


class ChatRequest(ChatTemplateFields, GenerationRequest):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs or self.logprob_token_ids else None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    # Checked by hand: a prompt may be 100,000 token ids, and pydantic would report each of them against each type.
    prompt: Annotated[str | list[str] | list[int] | list[list[int]], SkipValidation]
    echo: bool = False
    logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return super().num_logprobs if self.logprobs is None else self.logprobs
