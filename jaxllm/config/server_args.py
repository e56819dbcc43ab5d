"""The HTTP server's flags, with vLLM's names. Knows names, types and ranges: no socket, no engine."""

import re
from dataclasses import dataclass

from jaxllm.config.engine_args import flag
from jaxllm.config.errors import InputError

_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
UVICORN_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")

# vLLM's server flags whose feature is not built yet, with the value that asks for nothing. Any other value is refused.
NOT_BUILT_IN_SERVER: dict[str, object] = {
    "uds": None,
    "headless": False,
    "api_key": None,
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "ssl_ca_certs": None,
    "ssl_cert_reqs": 0,
    "ssl_ciphers": None,
    "enable_ssl_refresh": False,
    "middleware": None,
    "enable_request_id_headers": False,
    "chat_template_content_format": "auto",
    "trust_request_chat_template": False,
    "default_chat_template_kwargs": None,
    "return_tokens_as_token_ids": False,
    "tool_parser_plugin": None,
    "tool_server": None,
    "exclude_tools_when_tool_choice_none": False,
    "reasoning_parser_plugin": None,
    "enable_force_include_usage": False,
    "enable_server_load_tracking": False,
    "enable_per_request_metrics": False,
    "enable_tokenizer_info_endpoint": False,
    "tokens_only": False,
    "enable_log_requests": False,
    "enable_log_outputs": False,
    "enable_log_deltas": False,
    "max_log_len": None,
    "log_config_file": None,
    "log_error_stack": False,
    "disable_access_log_for_endpoints": None,
    "h11_max_incomplete_event_size": None,
    "h11_max_header_count": None,
    "fingerprint_mode": None,
    "fingerprint_value": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """What a user may say about the HTTP server.

    Raises:
        InputError: a value out of range.
    """

    host: str = flag("0.0.0.0", "address to listen on; the default is every interface, 127.0.0.1 this machine only")
    port: int = flag(8000, "port to listen on; 0 takes a free one")
    api_server_count: int = flag(1, "processes that answer HTTP, over one engine")
    root_path: str = flag("", "path below which a proxy in front shows the server")
    served_model_name: tuple[str, ...] = flag((), "names that clients may ask for; answers carry the first")
    response_role: str = flag("assistant", "role of the answers in a chat")
    enable_prompt_tokens_details: bool = flag(False, "tell in usage how many prompt tokens came from a cache")
    allowed_origins: tuple[str, ...] = flag(("*",), "web pages that browsers let read the answers")
    allowed_methods: tuple[str, ...] = flag(("*",), "HTTP methods that such pages may use")
    allowed_headers: tuple[str, ...] = flag(("*",), "HTTP headers that such pages may send")
    allow_credentials: bool = flag(False, "let such pages send cookies")
    disable_fastapi_docs: bool = flag(False, "no /docs, /redoc and /openapi.json")
    uvicorn_log_level: str = flag("info", f"how much of the HTTP side is logged: {', '.join(UVICORN_LOG_LEVELS)}")
    disable_uvicorn_access_log: bool = flag(False, "no log line per HTTP request")
    metrics_prefix: str = flag("vllm:", "what the names of vLLM's metrics begin with on /metrics")
    shutdown_timeout: float = flag(30.0, "seconds that running requests have to end after SIGTERM; 0 aborts them")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InputError(f"port={self.port} is not between 0 and 65535")
        if self.api_server_count < 1:
            raise InputError(f"api_server_count must be at least 1, got {self.api_server_count}")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise InputError(f"shutdown_timeout must be at least 0 seconds, got {self.shutdown_timeout}")
        if self.uvicorn_log_level not in UVICORN_LOG_LEVELS:
            raise InputError(
                f"uvicorn_log_level={self.uvicorn_log_level!r} is not known; choose one of "
                f"{', '.join(UVICORN_LOG_LEVELS)}"
            )
        if not _METRIC_NAME.fullmatch(self.metrics_prefix + "x"):
            raise InputError(
                f"metrics_prefix={self.metrics_prefix!r} cannot begin a metric's name: use letters, digits, _ and :, "
                "and no digit first"
            )
        if self.root_path and not self.root_path.startswith("/"):
            raise InputError(f"root_path={self.root_path!r} must start with a slash")

    def model_names(self, model: str) -> tuple[str, ...]:
        """Gives the names under which a model is served: as in vLLM, the model as given if the user says nothing."""
        return self.served_model_name or (model,)


def refuse_not_built_in_server(name: str, value: object) -> None:
    """Refuses a value that asks for a feature which does not exist yet. It may be a secret, so it is not shown."""
    neutral = NOT_BUILT_IN_SERVER[name]
    if value != neutral:
        raise InputError(
            f"{name} is not supported yet; leave it out" + ("" if neutral is None else f" or at {neutral!r}")
        )
