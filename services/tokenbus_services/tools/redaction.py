"""Keeps secrets of this process out of what a model is told of an error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_SECRET_NAME = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
_SHORTEST = 6
"""A shorter value is no secret, and would be found in any text."""


class Redaction:
    """Takes the values of environment variables out of texts: those named here, and those whose name says secret."""

    def __init__(self, env: Mapping[str, str], named: Iterable[str] = ()) -> None:
        names = {*named, *filter(_SECRET_NAME.search, env)}
        values = {value for name in names if len(value := env.get(name, "")) >= _SHORTEST}
        # The longest first, so that one inside another leaves no rest.
        self._secret = re.compile("|".join(map(re.escape, sorted(values, key=len, reverse=True)))) if values else None

    def __call__(self, text: str) -> str:
        """The text without the secrets."""
        return self._secret.sub("[redacted]", text) if self._secret else text
