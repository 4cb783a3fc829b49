"""The conversation on a terminal: a line to type on, which stays below what streams.

Full rows go to the terminal's scrollback. What changes stays with the line to type on: the row that grows, the messages
that wait, and who answers.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, run_in_terminal
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText, StyleAndTextTuples
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle, print_formatted_text
from prompt_toolkit.styles import Style

from tokenbus.events.public import Waiting
from tokenbus_services.cli.chat import asking
from tokenbus_services.cli.chat.conversation import COMMANDS, LEAVING, Conversation
from tokenbus_services.cli.chat.rows import Row, Rows
from tokenbus_services.cli.chat.transcript import Piece
from tokenbus_services.terminal_text import safe, visible

_REDRAW_S = 0.04
_WAITING_CHARS = 60
_STYLE = Style.from_dict({"dim": "ansibrightblack", "bottom-toolbar": "noreverse ansibrightblack"})


class _Silent(Vt100Input):
    """An input that echoes nothing while rows are printed: what is typed then would stay between them for good."""

    def cooked_mode(self) -> AbstractContextManager[None]:
        return nullcontext()


class Terminal:
    """Shows one conversation, and reads what is typed."""

    def __init__(self) -> None:
        self._rows = Rows()
        self._lines: asyncio.Queue[tuple[str, Waiting | None]] = asyncio.Queue()
        self._asked: Waiting | None = None
        """What the input line asks, as it is on the screen."""
        self._begun = False
        self._about: Waiting | None = None
        """The question that was shown when the user began to type, if there is a typed line."""
        self._output = create_output()
        self._app: Application[str]

    def show(self, piece: Piece) -> None:
        """Show a piece, once it runs; for `Conversation`."""
        self._rows.add(piece, self._output.get_size().columns)

    async def run(self, conversation: Conversation, provider_names: list[str]) -> None:
        """Talk until the person leaves. Raises the error that ended the conversation."""
        prompt: PromptSession[str] = PromptSession(
            lambda: self._message(conversation),
            bottom_toolbar=lambda: _status(conversation),
            key_bindings=self._keys(conversation),
            history=InMemoryHistory(conversation.own),
            completer=_Words(provider_names, conversation),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            erase_when_done=True,
            style=_STYLE,
            input=_Silent(sys.stdin),
            output=self._output,
        )
        self._app = prompt.app
        self._app.min_redraw_interval = _REDRAW_S
        prompt.default_buffer.on_text_changed += self._typed

        def begin() -> None:  # inside the application, so that these tasks know it
            for work in (self._draw(conversation), self._submit(conversation), self._fail(conversation)):
                self._app.create_background_task(work)

        await prompt.prompt_async(pre_run=begin)
        self._rows.end()
        self._print(self._rows.take())

    async def _draw(self, conversation: Conversation) -> None:
        while True:
            conversation.changed.clear()
            if rows := self._rows.take():
                await run_in_terminal(lambda rows=rows: self._print(rows))
            self._app.invalidate()
            await conversation.changed.wait()

    def _print(self, rows: list[Row]) -> None:
        text: StyleAndTextTuples = []
        for number, row in enumerate(rows):
            text += [*([("", "\n")] if number else []), *row]
        if rows:
            print_formatted_text(FormattedText(text), style=_STYLE, output=self._output)

    async def _submit(self, conversation: Conversation) -> None:
        """One line after the other: their order is that in which they were typed."""
        while True:
            line, about = await self._lines.get()
            await conversation.submit(line, about=about)

    async def _fail(self, conversation: Conversation) -> None:
        try:
            await asyncio.shield(conversation.failed)
        except asyncio.CancelledError:
            raise
        except Exception as e:
            self._app.exit(exception=e)

    def _message(self, conversation: Conversation) -> StyleAndTextTuples:
        """What stands before the typed line: the row that grows, and what waits."""
        text: StyleAndTextTuples = []
        if row := self._rows.growing:
            text += [*row, ("", "\n")]
        transcript = conversation.transcript
        for message in transcript.waiting.values():
            state = "goes in at the next turn, or follows" if message.steers else "waits"
            text.append(("class:dim", f"  {_short(message.author)} > {_short(message.text)} ({state})\n"))
        for append, message in conversation.sending.items():
            if append not in transcript.waiting and append not in transcript.runs:
                text.append(("class:dim", f"  {_short(message)} (sending)\n"))
        self._asked = ask = conversation.ask
        if ask:
            others = len(transcript.asks) - len(conversation.deciding)
            which = f"{_short(asking.call(ask))}{f' (1 of {others})' if others > 1 else ''}"
            text.append(("ansiyellow", f"  {which}\n  {asking.HINTS[ask.what]}\n"))
        return [*text, ("bold ansicyan", "> ")]

    def _typed(self, buffer: Buffer) -> None:
        """A line is about what was asked when it began: another person may decide that while it is typed."""
        if not buffer.text:
            self._begun = False
        elif not self._begun:
            self._begun, self._about = True, self._asked

    def _keys(self, conversation: Conversation) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def submit(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            line = buffer.text.strip()
            buffer.reset(append_to_history=bool(line))
            if line in LEAVING:
                event.app.exit(result="")
            elif line:
                self._lines.put_nowait((line, self._about))
            self._begun = False

        @keys.add("escape", "enter")
        def break_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c")
        def interrupt(event: KeyPressEvent) -> None:
            if conversation.answering:
                event.app.create_background_task(conversation.interrupt())
            elif event.current_buffer.text:
                event.current_buffer.reset()
            else:
                event.app.exit(result="")

        @keys.add("c-d")
        def leave(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.delete()
            else:
                event.app.exit(result="")

        _ = submit, break_line, interrupt, leave
        return keys


class _Words(Completer):
    """Completes commands, names of providers behind `/model`, and a call's arguments behind `yes`, to edit them."""

    def __init__(self, provider_names: list[str], conversation: Conversation) -> None:
        self._provider_names = provider_names
        self._conversation = conversation

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        ask = self._conversation.ask
        if text == "yes " and ask and ask.what == "approval" and ask.arguments:
            yield Completion(visible(ask.arguments))
        if not text.startswith("/"):
            return
        command, space, argument = text.partition(" ")
        words = self._provider_names if space and command == "/model" else [] if space else COMMANDS
        typed = argument if space else text
        for word in words:
            if word.startswith(typed):
                yield Completion(word, start_position=-len(typed))


def _status(conversation: Conversation) -> StyleAndTextTuples:
    words = [conversation.session.name, conversation.transcript.model]
    if conversation.ask:
        words.append("it asks, Ctrl-C interrupts")
    elif conversation.answering:
        words.append("answering, Ctrl-C interrupts")
    elif conversation.transcript.open_run:
        words.append("interrupting")
    else:
        words.append("/help")
    return [("", safe(" · ".join(words)).replace("\n", " "))]


def _short(text: str) -> str:
    line = " ".join(safe(text).split())
    return line if len(line) <= _WAITING_CHARS else f"{line[:_WAITING_CHARS]}…"
