"""Participant names in a conversation written as one text, and the strings that end the model's turn in it."""

from __future__ import annotations

from tokenbus.events.quirks import Quirks
from tokenbus.events.requests import Generate, PrefillOptions
from tokenbus.providers.request.build import accepted_stops

PREFIX = "antml:"
"""Optional prefix of any tag name."""
CALLS_CLOSES = ("</function_calls>", f"</{PREFIX}function_calls>")
DEFAULT_USER = "User"
"""The name for user messages without a participant."""
MAX_NAMES = 10
"""Maximum number of participant names sent as stop strings, most recent first."""

_PLAIN = PrefillOptions()


def options_of(request: Generate) -> PrefillOptions:
    """The request's prefill options, or the defaults."""
    return request.prefill or _PLAIN


def end_of_turn(request: Generate, quirks: Quirks, default: str = "") -> str:
    """The token that ends each message: from the request, else the vendor, else ``default`` (the API's). Empty:
    none."""
    for choice in (options_of(request).end_of_turn, quirks.end_of_turn):
        if choice is not None:
            return choice
    return default


def between(request: Generate, token: str) -> str:
    """The separator between two messages."""
    delimiter = options_of(request).delimiter
    return token + (("" if token else "\n") if delimiter is None else delimiter)


class Names:
    """Resolves the participant name written before each message."""

    def __init__(self, request: Generate) -> None:
        self._own = request.participant or ""
        self._left_out = frozenset(options_of(request).unnamed)

    def of(self, participant: str | None, role: str) -> str:
        """The name for a message of this participant; empty if it is written without one."""
        default = {"user": DEFAULT_USER, "assistant": self._own}.get(role, "")
        name = default if participant is None else participant
        return "" if not name.strip() or name in self._left_out else name


def reading_stops(request: Generate) -> tuple[str, ...]:
    """The stop strings that end a turn in top-level text: all other participants' names, most recent first, then the
    request's.
    """
    return tuple(dict.fromkeys([*_name_stops(request), *request.stop]))


def _name_stops(request: Generate) -> list[str]:
    delimiter = options_of(request).delimiter
    before = delimiter if delimiter and not delimiter.endswith("\n") else "\n"
    names_of, names = Names(request), dict[str, None]()
    for message in reversed(request.messages):
        name = names_of.of(message.participant, message.role)
        if name and name != request.participant:
            names[name] = None
    return [f"{before}{name}:" for name in names]


def provider_stops(request: Generate, token: str, limit: int | None, *, blanks: bool = True) -> list[str]:
    """The stop strings to send, at most ``limit``: end-of-turn token, names, closing call tags, the request's own.

    The parser finds the ones that were not sent. ``blanks``: the provider accepts whitespace-only strings.
    """
    names = [stop for stop in _name_stops(request)[:MAX_NAMES] if stop not in request.stop]
    ends = [token] if token and options_of(request).stop_on_end_of_turn else []
    return accepted_stops([*ends, *names, *CALLS_CLOSES, *request.stop], limit, blanks=blanks)
