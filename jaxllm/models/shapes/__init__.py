"""Configurations of published models, by name: what `--load-format dummy` fills with random weights."""

import json
from importlib import resources


def shape_names() -> list[str]:
    """Lists the names that `find_shape` knows."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def find_shape(name: str) -> dict | None:
    """Gives the config.json of a published model, or None if its shape is not kept here."""
    file = resources.files(__name__) / f"{name.lower()}.json"
    return json.loads(file.read_text()) if file.is_file() else None
