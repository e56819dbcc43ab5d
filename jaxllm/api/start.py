"""Keyword arguments -> a built engine and its tokenizer: the start that LLM and AsyncLLM share. Answers no request."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.engine.build import BuiltEngine, ModelSource, StartTimes, build_engine, find_model
from jaxllm.engine.processes.group import ProcessGroup
from jaxllm.models.checkpoint.resolve import open_checkpoint
from jaxllm.text.folder_tokenizer import tokenizer_from_folder
from jaxllm.text.gguf_tokenizer import tokenizer_from_gguf
from jaxllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Started(NamedTuple):
    """A running engine and the tokenizer beside it; tokenizer is None with skip_tokenizer_init."""

    built: BuiltEngine
    tokenizer: Tokenizer | None
    model_name: str = "model"


def start_engine(args: EngineArgs) -> Started:
    """Opens the model, makes its tokenizer, builds the engine and logs the start-up table.

    Raises:
        InputError: the user's mistake, in one line.
    """
    if args.node_rank > 0:
        raise InputError(
            f"node_rank={args.node_rank}: requests go to process 0; the others call jaxllm.api.follower.run_follower "
            "with the same options, or `jaxllm serve` with the same flags"
        )
    times = StartTimes()
    processes = None
    if args.nnodes > 1:
        with times.phase("other processes"):
            processes = ProcessGroup(args)
    try:
        with times.phase("open"):
            source = find_model(args)
        with times.phase("tokenizer"):
            tokenizer = _make_tokenizer(args, source)
        eos = tokenizer.eos_token_ids if tokenizer is not None else ()
        built = build_engine(args, source, eos_token_ids=eos, times=times, processes=processes)
    except BaseException as error:
        if processes is not None:
            processes.fail(error)
        raise
    for label, value in built.report():
        logger.info("%-21s %s", label, value)
    return Started(built, tokenizer, args.model)


def _make_tokenizer(args: EngineArgs, source: ModelSource) -> Tokenizer | None:
    if args.skip_tokenizer_init:
        return None
    checkpoint = source.checkpoint
    if args.tokenizer is not None:
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
