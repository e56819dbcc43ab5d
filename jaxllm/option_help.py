"""What `--help` answers: everything, one group, or one flag. Knows text that is rendered already; no parser."""

import difflib
import pydoc
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxllm.config.errors import InputError
from jaxllm.config.flags_without_effect import FLAGS_WITHOUT_EFFECT

_TOPICS = (
    ("--help=GROUP", "one group, for example --help=SchedulerConfig"),
    ("--help=FLAG", "one flag, for example --help=max-num-seqs, or all whose name has a word in it: --help=max"),
    ("--config FILE", "takes flags from a YAML file; those that are typed win"),
    ("--help=all", "everything; --help=page the same, page by page"),
)


class Section(NamedTuple):
    """A group of flags: its text as a whole, that of each flag by spelling, and whether a plain --help shows it."""

    title: str
    rendered: tuple[str, dict[str, str]]
    is_own: bool

    @property
    def text(self) -> str:
        return self.rendered[0]

    @property
    def entries(self) -> dict[str, str]:
        return self.rendered[1]

    @property
    def about(self) -> str:
        """The line that describes the group, if it has one."""
        lines = self.text.strip().splitlines()
        return lines[1].strip() if len(lines) > 2 and not lines[2].strip() else ""


def help_text(head: str, sections: Sequence[Section], topic: str, neutral_values: Mapping[str, object]) -> str:
    """Gives the text on a topic; without one, the command's own flags and the names of the other groups.

    Raises:
        InputError: no group and no flag is called so.
    """
    shown = [section for section in sections if section.entries]
    if topic in ("all", "page"):
        return "\n".join([head.rstrip() + "\n", *(section.text for section in shown)])
    if not topic:
        return _overview(head, shown)
    if topic == "listgroup":
        return _listed(shown)
    for section in shown:
        if section.title.lower() == topic.lower():
            return section.text
    return _flags(topic, shown, neutral_values)


def show(text: str, paged: bool = False) -> None:
    """Prints, page by page if that is asked for and somebody reads it."""
    if paged and sys.stdout.isatty():
        pydoc.pager(text)
    else:
        print(text.rstrip(), flush=True)


def _overview(head: str, sections: Sequence[Section]) -> str:
    own = [section.text for section in sections if section.is_own]
    others = [section for section in sections if not section.is_own]
    parts = [head.rstrip() + "\n", *own]
    if others:
        topics = "\n".join(f"  {name:16}{meaning}" for name, meaning in _TOPICS)
        parts += [f"Groups of flags:\n{_listed(others)}\n\nFor more:\n{topics}"]
    return "\n".join(parts)


def _listed(sections: Sequence[Section]) -> str:
    return "\n".join(f"  {section.title:22}{section.about}".rstrip() for section in sections)


def _flags(topic: str, sections: Sequence[Section], neutral_values: Mapping[str, object]) -> str:
    """One flag by its name, or all whose names hold the topic."""
    wanted = topic.replace("_", "-").lstrip("-").lower()
    entries = {spelling.lstrip("-"): text for section in sections for spelling, text in section.entries.items()}
    if wanted in entries:
        return entries[wanted]
    refused = {name.replace("_", "-"): value for name, value in neutral_values.items()}
    if (name := wanted.replace("-", "_")) in FLAGS_WITHOUT_EFFECT and wanted in refused:
        return f"--{wanted} is taken, but has no effect: {FLAGS_WITHOUT_EFFECT[name].why}"
    if wanted in refused:
        neutral = "" if refused[wanted] is None else f"; only {str(refused[wanted]).lower()} is accepted"
        return f"--{wanted} is known, but not built yet{neutral}"
    found = dict.fromkeys(text for name, text in entries.items() if wanted in name)
    if found:
        return "".join(found)
    names = [*entries, *refused, *(section.title for section in sections)]
    near = difflib.get_close_matches(topic, names, n=1)
    hint = f"; did you mean --help={near[0]}?" if near else "; --help lists the groups"
    raise InputError(f"no flag and no group is called {topic!r}{hint}")
