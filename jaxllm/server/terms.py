"""What holds for a request besides its body. Plain data: knows no HTTP and no flags."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Terms:
    """Its name, if the client gave one, its deadline in time.monotonic(), and what the server's flags say of templates.

    A server's template variables are those that a request's own override.
    """

    request_id: str | None = None
    deadline: float | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    trusts_templates: bool = False

    def ids(self, kind: str) -> tuple[str, str]:
        """Gives the id that the answer has, and the one that the engine has: clients may give one name twice."""
        fresh = uuid.uuid4().hex
        if self.request_id is None:
            return f"{kind}{fresh}", f"{kind}{fresh}"
        return f"{kind}{self.request_id}", f"{kind}{self.request_id}-{fresh[:8]}"


NO_TERMS = Terms()
