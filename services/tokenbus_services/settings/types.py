"""The base of all settings tables, and the types of their values, each described in the words of an error."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tokenbus.events.waits import MAX_TIMEOUT_S

Seconds = Annotated[float, Meta(gt=0)]
WaitSeconds = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
"""How long somebody may be waited for."""
Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=1)]
HttpUrl = Annotated[
    str,
    Meta(
        pattern=r"^https?://[^/?#\s]+[^?#\s]*$(?!\n)",
        description="an address as `https://HOST` or `http://HOST:PORT/PATH`",
    ),
]
HeaderName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$(?!\n)", description="the name of an HTTP header")
]
HeaderValue = Annotated[str, Meta(pattern=r"^[ -~]*$(?!\n)", description="text in ASCII on one line")]
Currency = Annotated[str, Meta(pattern=r"^[A-Z]{3}$(?!\n)", description="a code of ISO 4217 as `USD`")]
ImportPath = Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$(?!\n)", description="`module:name`")]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file. Unknown keys are errors, so that typos are reported."""
