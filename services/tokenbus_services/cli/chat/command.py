"""`tokenbus chat`: chooses what a new session is, and talks on a terminal or through pipes."""

from __future__ import annotations

import asyncio
import getpass
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tokenbus.client.publishing import new_run_id
from tokenbus.events.requests import WhenBusy
from tokenbus_services import settings as configuration
from tokenbus_services.cli import connect, mock
from tokenbus_services.cli.chat.conversation import LEAVING, Conversation, fresh_name
from tokenbus_services.cli.chat.transcript import NOBODY, Piece
from tokenbus_services.cli.exit_codes import OTHER, RUN_STATUS
from tokenbus_services.cli.render.output import console, safe, write

REMEMBERED = 10
"""Messages of earlier that a terminal shows, with their answers."""

MOCK_HINT = "The mock provider answers. Try “Do I need an umbrella?”, or “Tell me a story”, and type while it speaks."


async def chat(
    name: str | None,
    options: Mapping[str, str | None],
    *,
    tools: Sequence[str],
    me: str | None,
    tenant: str,
    when_busy: WhenBusy,
) -> int:
    """Talk in a session until the person leaves, or stdin ends; return the exit code."""
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if tools:
        given["tools"] = [{"name": tool} for tool in tools]
    default, providers = _default(), [*configuration.load().providers]
    if connect.has_mock_provider():
        providers += mock.provider_names()
    async with connect.client() as bus:
        if sys.stdin.isatty() and console():
            from tokenbus_services.cli.chat.terminal import Terminal

            terminal = Terminal()
            shown, remembered = terminal.show, REMEMBERED
        else:
            terminal = None
            shown, remembered = _Plain(), 0
        conversation = Conversation(
            bus, shown, me=me or _user(), tenant=tenant, when_busy=when_busy, remembered=remembered
        )
        async with conversation.entered(name or fresh_name(), given, default):
            if terminal is None:
                assert isinstance(shown, _Plain)
                return await _piped(conversation, shown)
            if not conversation.transcript.said and connect.has_mock_provider():
                terminal.show(Piece("note", MOCK_HINT))
            await terminal.run(conversation, sorted(providers))
    again = ["tokenbus", "chat", conversation.session.name, *(("--tenant", tenant) if tenant else ())]
    print("the session stays:", shlex.join(again), file=sys.stderr)
    return 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name for this user id
        return NOBODY


def _default() -> Mapping[str, object]:
    """What a new session is, unless options say more. Raises SettingsError in the directory of no deployment."""
    if connect.has_mock_provider():
        demo = mock.demo_request()
        return {name: demo[name] for name in ("provider", "model", "tools")}
    connect.with_server(configuration.load())
    return {}


class _Plain:
    """Writes the answers to one message after the other to stdout, and what else happens to them to stderr."""

    def __init__(self) -> None:
        self.conversation: Conversation
        self.append = ""
        self._block: tuple[str, int] | None = None

    def __call__(self, piece: Piece) -> None:
        if piece.run is not None and piece.run != self.conversation.transcript.runs.get(self.append):
            return  # of another's message
        if piece.kind == "answer":
            if piece.block != self._block:
                self.end_line()
            self._block = piece.block
            write((safe(piece.text) if sys.stdout.isatty() else piece.text).encode(errors="replace"))
        elif piece.kind in ("ask", "note", "error"):
            self.end_line()
            print(safe(piece.text), file=sys.stderr, flush=True)
            if piece.kind == "ask":
                print(f"`tokenbus waiting {piece.run}` lists it", file=sys.stderr, flush=True)

    def end_line(self) -> None:
        """End the answer's last line."""
        if self._block is not None:
            write(b"\n")
        self._block = None


async def _piped(conversation: Conversation, plain: _Plain) -> int:
    """Send each line once the one before is answered; return the exit code for the last answer."""
    plain.conversation, code = conversation, 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip() in LEAVING:
            break
        plain.append = new_run_id()
        if await conversation.submit(line, when_busy="enqueue", append=plain.append):
            status = await conversation.answered(plain.append)
            plain.end_line()
            code = RUN_STATUS.get(status or "", OTHER)
    return code
