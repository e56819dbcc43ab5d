"""Arguments and objects of a program -> a built engine and its tokenizer, for LLM and AsyncLLM. Answers no request."""

import logging
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxllm.config.engine_args import EngineArgs, engine_args
from jaxllm.config.errors import InputError
from jaxllm.engine.build import BuiltEngine, StartTimes, build_engine
from jaxllm.engine.model_source import ModelSource, find_model, take_model
from jaxllm.engine.processes.group import ProcessGroup
from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.caller import callers_axes, engine_mesh, without_callers_mesh
from jaxllm.models.checkpoint.resolve import open_checkpoint
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.given import GivenModel, given_model
from jaxllm.text.folder_tokenizer import tokenizer_from_folder
from jaxllm.text.gguf_tokenizer import tokenizer_from_gguf
from jaxllm.text.loaded_tokenizer import tokenizer_from_object
from jaxllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

type ModelLike = str | PathLike[str] | Decoder | tuple[ModelConfig, Any]
type TokenizerLike = str | PathLike[str] | Tokenizer | Any | None


class Started(NamedTuple):
    """A running engine and the tokenizer beside it; tokenizer is None with skip_tokenizer_init."""

    built: BuiltEngine
    tokenizer: Tokenizer | None
    model_name: str = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a Python program hands over beside the flags; None asks for the usual."""

    model: GivenModel | None = None
    tokenizer: Tokenizer | None = None
    mesh: Mesh | None = None
    axis_rules: AxisRules | None = None


def start(
    model: ModelLike,
    options: Mapping[str, Any],
    *,
    tokenizer: TokenizerLike = None,
    mesh: Mesh | None = None,
    axis_rules: AxisRules | None = None,
) -> Started:
    """Starts an engine from the arguments of LLM and AsyncLLM.

    Raises:
        InputError: the user's mistake, in one line.
    """
    path, own = None, None
    if isinstance(tokenizer, str | PathLike):
        path = fspath(tokenizer)
    elif tokenizer is not None:
        own = tokenizer_from_object(tokenizer)
    if isinstance(model, str | PathLike):
        given, name = None, fspath(model)
    else:
        given = given_model(model)
        name = given.cfg.architecture
    args = engine_args({**options, "model": name, "tokenizer": path})
    if given is not None and tokenizer is None and not args.skip_tokenizer_init:
        raise InputError("a model that is handed over has no tokenizer: give tokenizer=, or set skip_tokenizer_init")
    return start_engine(args, Held(model=given, tokenizer=own, mesh=mesh, axis_rules=axis_rules))


def start_engine(args: EngineArgs, held: Held | None = None) -> Started:
    """Opens the model, makes its tokenizer, builds the engine and logs the start-up table.

    Raises:
        InputError: the user's mistake, in one line.
    """
    if args.node_rank > 0:
        raise InputError(
            f"node_rank={args.node_rank}: requests go to process 0; the others call jaxllm.api.follower.run_follower "
            "with the same options, or `jaxllm serve` with the same flags"
        )
    held, times = held or Held(), StartTimes()
    if args.nnodes == 1:
        with without_callers_mesh():
            return _start(args, held, times)
    if held.model is not None or held.mesh is not None:
        raise InputError(f"nnodes={args.nnodes}: a model or mesh can be handed to one process only; name a folder")
    with times.phase("other processes"):
        processes = ProcessGroup(args)
    try:
        with without_callers_mesh():
            return _start(args, held, times, processes)
    except BaseException as error:
        processes.fail(error)
        raise


def _start(args: EngineArgs, held: Held, times: StartTimes, processes: ProcessGroup | None = None) -> Started:
    mesh = _engine_mesh(args, held)
    with times.phase("open"):
        source = find_model(args) if held.model is None else take_model(args, held.model)
    with times.phase("tokenizer"):
        tokenizer = _make_tokenizer(args, source, held.tokenizer)
    eos = tokenizer.eos_token_ids if tokenizer is not None else ()
    built = build_engine(args, source, eos_token_ids=eos, mesh=mesh, times=times, processes=processes)
    for label, value in built.report():
        logger.info("%-21s %s", label, value)
    return Started(built, tokenizer, args.model)


def _engine_mesh(args: EngineArgs, held: Held) -> Mesh | None:
    if held.mesh is None:
        if held.axis_rules is not None:
            raise InputError("axis_rules name the axes of a mesh: give mesh= as well")
        return None
    for name in ("data_parallel_size", "tensor_parallel_size"):
        if getattr(args, name) != 1:
            raise InputError(f"{name}={getattr(args, name)}: the sizes are those of mesh=; leave it out")
    try:
        return engine_mesh(held.mesh, callers_axes(held.mesh, held.axis_rules))
    except ValueError as error:
        raise InputError(str(error)) from None


def _make_tokenizer(args: EngineArgs, source: ModelSource, own: Tokenizer | None) -> Tokenizer | None:
    if args.skip_tokenizer_init:
        return None
    checkpoint = source.checkpoint
    if own is not None:
        tokenizer = copy(own)  # the caller's keeps its chat template
    elif args.tokenizer is not None:
        folder = Path(args.tokenizer).expanduser()
        if (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file():
            tokenizer = tokenizer_from_folder(folder)
        else:
            tokenizer = _checkpoint_tokenizer(open_checkpoint(args.tokenizer, None, args.download_dir, args.hf_token))
    elif checkpoint is None:  # dummy weights: a tokenizer only where one lies beside the configuration
        folder = Path(args.model).expanduser()
        if not (folder / "tokenizer.json").is_file():
            logger.info("no tokenizer for dummy weights of %s: token ids in, token ids out", args.model)
            return None
        tokenizer = tokenizer_from_folder(folder)
    else:
        tokenizer = _checkpoint_tokenizer(checkpoint)
    if args.chat_template is not None:
        tokenizer.chat_template = read_chat_template(args.chat_template, tokenizer.named_chat_templates)
    return tokenizer


def _checkpoint_tokenizer(checkpoint) -> Tokenizer:
    fields = checkpoint.tokenizer_fields()
    return tokenizer_from_folder(checkpoint.path) if fields is None else tokenizer_from_gguf(fields)


def read_chat_template(value: str, named: Mapping[str, str]) -> str:
    """A chat template given by the model's own name for it, as a file's path, or as the template itself.

    Raises:
        InputError: it is none of these.
    """
    if value in named:
        return named[value]
    if "{" in value:
        return value
    path = Path(value).expanduser()
    if not path.is_file():
        own = f" (it has {', '.join(named)})" if named else ""
        raise InputError(
            f"chat_template={value!r} is neither a file here, nor a jinja2 template, nor one of the model's own{own}"
        )
    return path.read_text()
