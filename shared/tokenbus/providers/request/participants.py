"""Who speaks in a conversation that is written as one text, and what ends the model's turn there."""

from __future__ import annotations

from tokenbus.events.quirks import Quirks
from tokenbus.events.requests import Generate, PrefillOptions
from tokenbus.providers.request.build import told_stops

PREFIX = "antml:"
"""What may stand before the name of any tag."""
CALLS_CLOSES = ("</function_calls>", f"</{PREFIX}function_calls>")
DEFAULT_USER = "User"
"""The name of a user's message without a participant."""
MAX_NAMES = 10
"""Participants whose names the provider is told as stop strings: the most recent."""

_PLAIN = PrefillOptions()


def options_of(request: Generate) -> PrefillOptions:
    """How the text is written; what the request leaves open is as it is by default."""
    return request.prefill or _PLAIN


def end_of_turn(request: Generate, quirks: Quirks, default: str = "") -> str:
    """The token that ends each message: the request's, else the vendor's, else ``default``, the API's; empty: none."""
    for said in (options_of(request).end_of_turn, quirks.end_of_turn):
        if said is not None:
            return said
    return default


def between(request: Generate, token: str) -> str:
    """What stands between two messages."""
    delimiter = options_of(request).delimiter
    return token + (("" if token else "\n") if delimiter is None else delimiter)


class Names:
    """The names under which a request's messages stand."""

    def __init__(self, request: Generate) -> None:
        self._own = request.participant or ""
        self._left_out = frozenset(options_of(request).unnamed)

    def of(self, participant: str | None, role: str) -> str:
        """The name of a message by this participant; empty: it stands without one."""
        default = {"user": DEFAULT_USER, "assistant": self._own}.get(role, "")
        name = default if participant is None else participant
        return "" if not name.strip() or name in self._left_out else name


def reading_stops(request: Generate) -> tuple[str, ...]:
    """The stop strings that end the turn in text at top level: the names of all other participants, the most recent
    first, and the request's own."""
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
    """The stop strings that the provider is told, as many as it takes: the token that ends a turn, names, the close of
    calls, the request's own.

    Those that it is not told of are found in the text all the same. ``blanks``: it takes strings of blanks alone.
    """
    names = [stop for stop in _name_stops(request)[:MAX_NAMES] if stop not in request.stop]
    ends = [token] if token and options_of(request).stop_on_end_of_turn else []
    return told_stops([*ends, *names, *CALLS_CLOSES, *request.stop], limit, blanks=blanks)
