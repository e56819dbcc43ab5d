"""The HTTP server's flags, with vLLM's names. Knows names, types and ranges: no socket, no engine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config.engine_args import flag
from jaxllm.config.errors import InputError

_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
UVICORN_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
LOG_FORMATS = ("text", "json")
_PROFILER_KEYS = ("directory", "torch_profiler_dir", "profiler")  # the second is vLLM's name for the first

# vLLM's server flags whose feature is not built yet, with the value that asks for nothing. Any other value is refused.
NOT_BUILT_IN_SERVER: dict[str, object] = {
    "headless": False,
    "enable_ssl_refresh": False,
    "middleware": None,
    "chat_template_content_format": "auto",
    "tool_server": None,
    "exclude_tools_when_tool_choice_none": False,
    "enable_per_request_metrics": False,
    "tokens_only": False,
    "enable_log_deltas": False,
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
    uds: str | None = flag(None, "path of a Unix socket to listen on instead of host and port")
    root_path: str = flag("", "path below which a proxy in front shows the server")
    api_key: tuple[str, ...] = flag((), "keys of which clients must send one; also read from VLLM_API_KEY")
    admin_api_key: tuple[str, ...] = flag((), "keys of the admin routes, which are refused without one")
    ssl_keyfile: str | None = flag(None, "PEM file with the private key, for HTTPS")
    ssl_certfile: str | None = flag(None, "PEM file with the certificate, for HTTPS")
    ssl_ca_certs: str | None = flag(None, "PEM file with the authorities to check clients' certificates against")
    ssl_cert_reqs: int = flag(0, "whether clients need certificates: 0 no, 1 may have one, 2 must")
    ssl_ciphers: str | None = flag(None, "ciphers of HTTPS, as OpenSSL writes them")
    served_model_name: tuple[str, ...] = flag((), "names that clients may ask for; answers carry the first")
    response_role: str = flag("assistant", "role of the answers in a chat")
    default_chat_template_kwargs: Mapping[str, Any] | None = flag(
        None, "JSON object of chat template variables, which a request's own override"
    )
    trust_request_chat_template: bool = flag(False, "let requests bring a chat template of their own")
    return_tokens_as_token_ids: bool = flag(False, "tell tokens in log-probabilities as token_id:7")
    enable_prompt_tokens_details: bool = flag(False, "tell in usage how many prompt tokens came from a cache")
    enable_force_include_usage: bool = flag(False, "tell the usage at the end of every stream")
    enable_tokenizer_info_endpoint: bool = flag(False, "have the route /tokenizer_info")
    max_queued_requests: int | None = flag(None, "most requests that wait; beyond it 429 tells clients to come again")
    request_timeout: float | None = flag(None, "seconds after which a request is ended; a request may ask for fewer")
    allowed_origins: tuple[str, ...] = flag(("*",), "web pages that browsers let read the answers")
    allowed_methods: tuple[str, ...] = flag(("*",), "HTTP methods that such pages may use")
    allowed_headers: tuple[str, ...] = flag(("*",), "HTTP headers that such pages may send")
    allow_credentials: bool = flag(False, "let such pages send cookies")
    enable_request_id_headers: bool = flag(False, "answer with a header X-Request-Id: the client's, or a new one")
    disable_fastapi_docs: bool = flag(False, "no /docs, /redoc and /openapi.json")
    log_format: str = flag("text", "log lines as text, or as json: one object a line")
    log_config_file: str | None = flag(None, "JSON file for logging.config.dictConfig, instead of --log-format")
    uvicorn_log_level: str = flag("info", f"how much of the HTTP side is logged: {', '.join(UVICORN_LOG_LEVELS)}")
    disable_uvicorn_access_log: bool = flag(False, "no log line per HTTP request")
    metrics_prefix: str = flag("vllm:", "what the names of vLLM's metrics begin with on /metrics")
    disable_access_log_for_endpoints: str | None = flag(None, "paths without such a line: /health,/metrics")
    enable_log_requests: bool = flag(False, "log what each request asks for")
    enable_log_outputs: bool = flag(False, "log what each request was given too")
    max_log_len: int | None = flag(None, "most characters of a prompt or output in these lines; default: all")
    log_error_stack: bool = flag(False, "log the traceback of every request that failed, not of defects only")
    crash_dump_dir: str | None = flag(None, "folder for a file about the last requests when the engine fails")
    crash_dump_text: bool = flag(False, "let that file have their token ids too")
    profiler_config: Mapping[str, Any] | None = flag(
        None, 'JSON object: {"directory": DIR} lets /start_profile write a trace there'
    )
    h11_max_incomplete_event_size: int | None = flag(None, "most bytes of a request's headers; default 65536")
    shutdown_timeout: float = flag(30.0, "seconds that running requests have to end after SIGTERM; 0 aborts them")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InputError(f"port={self.port} is not between 0 and 65535")
        if self.api_server_count < 1:
            raise InputError(f"api_server_count must be at least 1, got {self.api_server_count}")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise InputError(f"shutdown_timeout must be at least 0 seconds, got {self.shutdown_timeout}")
        for name, known in (("uvicorn_log_level", UVICORN_LOG_LEVELS), ("log_format", LOG_FORMATS)):
            if getattr(self, name) not in known:
                raise InputError(f"{name}={getattr(self, name)!r} is not known; choose one of {', '.join(known)}")
        if not _METRIC_NAME.fullmatch(self.metrics_prefix + "x"):
            raise InputError(
                f"metrics_prefix={self.metrics_prefix!r} cannot begin a metric's name: use letters, digits, _ and :, "
                "and no digit first"
            )
        if self.root_path and not self.root_path.startswith("/"):
            raise InputError(f"root_path={self.root_path!r} must start with a slash")
        if self.request_timeout is not None and not 0 < self.request_timeout < float("inf"):
            raise InputError(f"request_timeout must be above 0 seconds, got {self.request_timeout}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} must be at least {least}, got {value}")
        self._check_keys()
        self._check_profiler()

    def _check_keys(self) -> None:
        for name in ("api_key", "admin_api_key"):
            if not all(getattr(self, name)):
                raise InputError(f"{name} must not be empty")
        if shared := set(self.api_key) & set(self.admin_api_key):
            raise InputError(f"api_key and admin_api_key have {len(shared)} key(s) in common: keep them apart")
        if (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs) and not self.ssl_certfile:
            raise InputError("HTTPS needs ssl_certfile, the certificate")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise InputError(f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise InputError(f"ssl_cert_reqs={self.ssl_cert_reqs} needs ssl_ca_certs, to check certificates against")
        if self.crash_dump_text and self.crash_dump_dir is None:
            raise InputError("crash_dump_text needs crash_dump_dir")

    def _check_profiler(self) -> None:
        if self.profiler_config is None:
            return
        if unknown := self.profiler_config.keys() - set(_PROFILER_KEYS):
            raise InputError(f"profiler_config has no key {min(unknown)!r}; it has: {', '.join(_PROFILER_KEYS)}")
        if not isinstance(self.profile_directory, str) or not self.profile_directory:
            raise InputError("profiler_config needs a 'directory' to write traces to")

    @property
    def profile_directory(self) -> str | None:
        """Where traces of /start_profile go; None where nobody said so."""
        config = self.profiler_config or {}
        return config.get("directory", config.get("torch_profiler_dir"))

    def model_names(self, model: str) -> tuple[str, ...]:
        """Gives the names under which a model is served: as in vLLM, the model as given if the user says nothing."""
        return self.served_model_name or (model,)


_LEAST = {"max_queued_requests": 0, "max_log_len": 0, "h11_max_incomplete_event_size": 1024}


def refuse_not_built_in_server(name: str, value: object) -> None:
    """Refuses a value that asks for a feature which does not exist yet. It may be a secret, so it is not shown."""
    neutral = NOT_BUILT_IN_SERVER[name]
    if value != neutral:
        raise InputError(
            f"{name} is not supported yet; leave it out" + ("" if neutral is None else f" or at {neutral!r}")
        )
