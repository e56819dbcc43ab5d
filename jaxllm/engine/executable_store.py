"""A folder of compiled programs, so that a start need not compile them again. Knows bytes and keys; compiles nothing.

DIR/<digest of the facts>/facts.json says what the programs beside it were compiled for; each is a file of its own,
written under another name first, so that processes may share a folder. What cannot be read, or does not fit, is one
line in the log and a compilation. The files are pickles: load only what you or your own machines have written.

What jax took from its own compilation cache is not kept: serialized again, it may lack functions (XLA on a CPU).
"""

import functools
import hashlib
import json
import logging
import os
import pickle
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path

import jax
import jax.monitoring
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jaxlib._jax import Device

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32
_SHOWN = 3  # facts that differ


class _Hits(threading.local):
    """How often a thread's compilations were found in jax's own cache."""

    count = 0


_hits = _Hits()


@functools.cache
def _watch_hits() -> None:
    def note(event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            _hits.count += 1

    jax.monitoring.register_event_listener(note)


class ExecutableStore:
    """Programs of one engine, by their keys' repr. Threads may load and save at the same time."""

    def __init__(self, directory: Path, facts: Mapping[str, str], devices: Sequence[Device]):
        self._devices = list(devices)
        self._folder = directory / _digest(json.dumps(facts, sort_keys=True).encode()).hex()[:24]
        self._can_save = True
        self._cached: set[Hashable] = set()
        _watch_hits()
        self.num_loaded = self.num_saved = 0
        try:
            self._open(directory, facts)
        except OSError as error:
            self._give_up(error)

    def holds(self, key: Hashable) -> bool:
        """Says whether there is a program under the key, whole or not."""
        return self._path(key).is_file()

    def load(self, key: Hashable) -> jax.stages.Compiled | None:
        """Gives the program kept under the key; None where there is none, or none that can be used."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be read, so it is compiled anew: %s", path, error.strerror)
            return None
        try:
            if _digest(content[_DIGEST_BYTES:]) != content[:_DIGEST_BYTES]:
                raise ValueError("its content is not what was written")
            program = deserialize_and_load(
                *pickle.loads(content[_DIGEST_BYTES:]),
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        except Exception as error:  # whatever an unpickled stranger raises
            lines = str(error).strip().splitlines() or [type(error).__name__]
            logger.warning("%s (%s) cannot be used, so it is compiled anew: %s", path, key, lines[0])
            return None
        self.num_loaded += 1
        return program

    def compile(self, key: Hashable, compile_program: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
        """Calls the function and remembers whether what it gives can be kept."""
        hits = _hits.count
        program = compile_program()
        if _hits.count > hits:
            self._note_cached(key)
        return program

    def save(self, key: Hashable, program: jax.stages.Compiled) -> None:
        """Keeps a program; one that cannot be kept is left out."""
        if not self._can_save or key in self._cached:
            return
        try:
            content = pickle.dumps(serialize(program))
        except Exception as error:  # jax's word for "not this one" is one of many
            lines = str(error).strip().splitlines() or [type(error).__name__]
            logger.warning("%s cannot be stored: %s", key, lines[0])
            return
        try:
            _write(self._path(key), _digest(content) + content)
        except OSError as error:
            self._give_up(error)
        else:
            self.num_saved += 1

    def _open(self, directory: Path, facts: Mapping[str, str]) -> None:
        if (self._folder / "facts.json").is_file():
            return
        others = [_read_facts(path) for path in directory.glob("*/facts.json")]
        if others:
            logger.warning("%s: %s, so programs are compiled anew", directory, describe_mismatch(facts, others))
        self._folder.mkdir(parents=True, exist_ok=True)
        _write(self._folder / "facts.json", json.dumps(facts, indent=1, sort_keys=True).encode())

    def _note_cached(self, key: Hashable) -> None:
        if not self._cached:
            logger.warning(
                "%s: jax's own cache has %s, so it cannot be stored; JAX_ENABLE_COMPILATION_CACHE=0 avoids it",
                self._folder.parent,
                key,
            )
        self._cached.add(key)

    def _path(self, key: Hashable) -> Path:
        return self._folder / f"{_digest(repr(key).encode()).hex()[:24]}.executable"

    def _give_up(self, error: OSError) -> None:
        if self._can_save:
            logger.warning("%s: nothing can be stored there: %s", self._folder.parent, error.strerror or error)
        self._can_save = False


def describe_mismatch(facts: Mapping[str, str], others: Sequence[Mapping[str, str]]) -> str:
    """Says in what the nearest of other engines differs."""
    differing = [[name for name in facts if other.get(name) != facts[name]] for other in others]
    nearest = min(range(len(others)), key=lambda i: len(differing[i]))
    shown = [
        f"{name} {others[nearest].get(name, 'unknown'):.40} (here {facts[name]:.40})"
        for name in differing[nearest][:_SHOWN]
    ]
    more = len(differing[nearest]) - len(shown)
    return f"executables are for {', '.join(shown)}{f' and {more} more' if more > 0 else ''}"


def _read_facts(path: Path) -> dict[str, str]:
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in facts.items()} if isinstance(facts, dict) else {}


def _write(path: Path, content: bytes) -> None:
    """Writes a file that others see whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
