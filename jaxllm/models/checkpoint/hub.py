"""Downloads a model from the Hugging Face hub. Knows which files serving needs, and reads none of them."""

from pathlib import Path

from jaxllm.config.errors import InputError

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights


def download(repo: str, revision: str | None, download_dir: str | None, hf_token: str | None) -> Path:
    """Brings config, tokenizer and safetensors files here, or finds them in the hub's cache.

    Raises:
        InputError: the hub is out of reach and the cache lacks the model, or the hub refuses, or holds no config.
    """
    # Imported here: a model from a folder needs no network client.
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            cache_dir=download_dir,
            token=hf_token,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
        )
    except Exception as error:  # the client raises some twenty types without a common ancestor
        at = "" if revision is None else f" at revision {revision}"
        said = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{repo} is neither a folder nor a file here, and the hub did not give it{at}: {said}"
        ) from error
    if not (Path(folder) / "config.json").exists():
        raise InputError(f"{repo} of the hub has no config.json: of a GGUF repository, download one file and name that")
    return Path(folder)
