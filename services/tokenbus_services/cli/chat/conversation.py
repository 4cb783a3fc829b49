"""One session as a person at a terminal uses it: what is typed becomes appends, what happens becomes pieces to show."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from tokenbus import Client
from tokenbus.client.publishing import new_run_id
from tokenbus.client.sessions.reader import SessionCursor
from tokenbus.client.sessions.session import Session
from tokenbus.errors import RequestInvalid, ServerUnavailable, SessionNotFound, TokenbusError
from tokenbus.events.public import Waiting
from tokenbus.events.requests import WaitDecision, WhenBusy
from tokenbus_services.cli.audit import noted_apart
from tokenbus_services.cli.chat import asking
from tokenbus_services.cli.chat.transcript import Piece, Transcript, began_with
from tokenbus_services.cli.render.event_text import time_span

T = TypeVar("T")

HELP = {
    "/model [PROVIDER[/MODEL]]": "who answers from the next message on",
    "/fork [NAME]": "go on in a new session that has this history",
    "/open NAME": "go on in another session",
    "/sessions [WORDS]": "sessions, the newest first; those with all these words",
    "/now TEXT": "say it at once: the answer goes on with it",
    "/answer VALUE": "the result of a tool, or the answer to a question, that is waited for",
    "/decline [REASON]": "give none",
    "/withdraw": "take back your last message that waits",
    "/quit": "leave; the session stays",
}
LEAVING = ("/quit", "/exit")
COMMANDS = (
    "/help",
    *(command.split("[")[0].removesuffix("NAME").removesuffix("TEXT").removesuffix("VALUE") for command in HELP),
)
"""As they are completed: those with an argument end in a space."""
LISTED = 20
"""Sessions that are shown at once."""
FIRST_AGAIN_S, LAST_AGAIN_S = 0.5, 5.0


def fresh_name() -> str:
    """A name for a new session."""
    return f"chat-{secrets.token_hex(3)}"


class Conversation:
    """What a terminal talks to. Use inside ``async with entered(…)``."""

    def __init__(
        self,
        bus: Client,
        show: Callable[[Piece], None],
        *,
        me: str,
        tenant: str,
        when_busy: WhenBusy,
        remembered: int,
    ) -> None:
        """``show`` gets the last ``remembered`` messages with their answers, and what happens from now on.
        ``when_busy``: of sessions that begin here.
        """
        self._bus = bus
        self._me = me
        self._tenant = tenant
        self._when_busy: WhenBusy = when_busy
        self._remembered = remembered
        self._show = show
        self._following: asyncio.Task[None] | None = None
        self.session: Session
        self.transcript = Transcript()
        self.sending: dict[str, str] = {}
        """Messages that no intake has accepted yet, by id."""
        self.interrupting: str | None = None
        """The run that is being interrupted."""
        self.deciding: set[tuple[str, str]] = set()
        """Run and wait of what this person has decided, and the session does not say yet."""
        self.changed = asyncio.Event()
        """Set with everything that happens."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the error that ends the conversation."""

    @property
    def answering(self) -> bool:
        """Whether there is an answer that can be interrupted, and is not being interrupted already."""
        run = self.transcript.open_run
        return run is not None and run != self.interrupting

    @property
    def ask(self) -> Waiting | None:
        """The question to ask: the undecided wait that is oldest."""
        return next((ask for key, ask in self.transcript.asks.items() if key not in self.deciding), None)

    @property
    def own(self) -> list[str]:
        """What this person said before."""
        return [text for author, text in self.transcript.said if author == self._me]

    @asynccontextmanager
    async def entered(
        self, name: str, given: Mapping[str, object], default: Mapping[str, object]
    ) -> AsyncGenerator[None]:
        """Enter a session, and follow it.

        ``given`` changes its configuration; ``default`` adds to that of a new one. Raises as `Session.configure` does.
        """
        try:
            await self._enter(name, given, default, remembered=self._remembered)
            yield
        finally:
            await self._leave()
            self.failed.cancel()

    async def _enter(
        self, name: str, given: Mapping[str, object], default: Mapping[str, object] | None, *, remembered: int
    ) -> None:
        """As `entered`. ``default`` None: the session must exist, or SessionNotFound is raised."""
        session = self._bus.session(name, tenant=self._tenant)
        transcript, before, cursor = Transcript(), list[Piece](), SessionCursor()
        try:
            before += began_with(await session.messages(runs=False))
            async for step in session.follow(live=False):
                before += transcript.feed(step)
                cursor = step.cursor
            transcript.config = await session.configuration()  # also if its event is too old to be kept
        except SessionNotFound:
            if default is None:
                raise
        await self._leave()
        self.session, self.transcript, self.interrupting = session, transcript, None
        self.deciding.clear()
        if transcript.config is None:
            request = {**(default or {}), **given}
            if missing := [option for option in ("provider", "model") if option not in request]:
                problem = "missing, for a session that begins; `tokenbus up --mock` needs none"
                raise RequestInvalid(f"--{missing[0]}", problem)
            await session.configure(request, when_busy=self._when_busy)
            await noted_apart("session.configure", session=name)
        elif given:
            await self._configure(given)
        for piece in _last(before, remembered):
            self._show(piece)
        self._following = asyncio.create_task(self._follow(cursor))
        while self.transcript.config is None:
            await self._news()

    async def _leave(self) -> None:
        if self._following:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def _follow(self, after: SessionCursor) -> None:
        while True:
            try:
                async for step in self.session.follow(after=after):
                    after = step.cursor
                    for piece in self.transcript.feed(step):
                        self._show(piece)
                    self.changed.set()
            except ServerUnavailable as e:  # longer than a reader waits by itself
                self._note(f"{e}; trying again")
            except Exception as e:
                if not self.failed.done():
                    self.failed.set_exception(e)
                return

    def _note(self, text: str) -> None:
        self._show(Piece("note", text))
        self.changed.set()

    # --- what is typed ----------------------------------------------------------------------------------------

    async def submit(
        self, line: str, *, about: Waiting | None = None, when_busy: WhenBusy | None = None, append: str | None = None
    ) -> bool:
        """Do what a line says; return whether it became a message, with this id. Errors are shown.

        ``about``: what was asked when the line was typed, so that it decides nothing else.
        """
        line = line.strip()
        try:
            if decision := asking.decided(about, line, self._me):
                await self._decide(decision)
            elif line.startswith("/") and not line.startswith("//"):
                await self._command(*line.split(maxsplit=1))
            elif line:
                line = line.removeprefix("/") if line.startswith("//") else line
                await self._say(line, when_busy, append or new_run_id())
                return True
        except TokenbusError as e:
            self._show(Piece("error", str(e)))
            self.changed.set()
        return False

    async def _decide(self, decision: WaitDecision) -> None:
        key = decision.run, decision.wait
        self.deciding.add(key)
        self.changed.set()
        try:
            fate = await self._accepted(lambda: self._bus.decide(decision))
        except TokenbusError:  # such as arguments that do not fit: it still waits
            self.deciding.discard(key)
            raise
        await noted_apart("decide", run=decision.run, wait=fate.wait, decision=fate.decision)

    async def _say(self, text: str, when_busy: WhenBusy | None, append: str, *, now: bool = False) -> None:
        self.sending[append] = text
        self.changed.set()
        try:
            send = self.session.send
            await self._accepted(lambda: send(text, participant=self._me, when_busy=when_busy, now=now, append=append))
        finally:
            del self.sending[append]
            self.changed.set()

    def interrupt(self) -> Coroutine[Any, Any, None]:
        """End the answer. What waits is answered next."""
        self.interrupting = self.transcript.open_run  # at once: a second Ctrl-C is none of this answer
        return self._interrupt(self.interrupting)

    async def _interrupt(self, run: str | None) -> None:
        append = new_run_id()
        try:
            receipt = await self._accepted(lambda: self.session.interrupt(append=append))
        except TokenbusError as e:
            self._show(Piece("error", str(e)))
        else:
            if receipt.fate.state != "returned":  # returned: it had just ended
                await noted_apart("session.interrupt", session=self.session.name, append=append, run=receipt.fate.run)
                return
        if self.interrupting == run:
            self.interrupting = None

    async def answered(self, append: str) -> str | None:
        """Wait until the run of a message has ended, and return how; None if the message was returned. Raises the
        error that ended the conversation.
        """
        while append not in self.transcript.runs or (
            (run := self.transcript.runs[append]) is not None and run not in self.transcript.ends
        ):
            await self._news()
        return self.transcript.ends[run] if (run := self.transcript.runs[append]) else None

    async def _news(self) -> None:
        self.changed.clear()
        waiting = asyncio.ensure_future(self.changed.wait())
        try:
            await asyncio.wait({waiting, self.failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self.failed.done():
            self.failed.result()

    async def _accepted(self, send: Callable[[], Awaitable[T]]) -> T:
        """Send until it is accepted. Its id makes repeating it safe."""
        again_s = FIRST_AGAIN_S
        while True:
            try:
                return await send()
            except TokenbusError as e:
                if not e.retryable:
                    raise
                self._note(f"{e}; trying again")
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, LAST_AGAIN_S)

    # --- commands ---------------------------------------------------------------------------------------------

    async def _command(self, command: str, argument: str = "") -> None:
        match command:
            case "/help":
                width = max(map(len, HELP))
                self._note("\n".join(f"{name:<{width}}  {what}" for name, what in HELP.items()))
            case "/model":
                await self._model(argument)
            case "/fork":
                before = self.session.name
                forked = await self.session.fork(argument or fresh_name())
                await noted_apart("session.fork", session=before, to=forked.name)
                await self._open(forked.name, "a fork", remembered=0)  # it begins with what is on the screen
            case "/open" if argument:
                await self._open(argument, "session", remembered=self._remembered)
            case "/sessions":
                await self._sessions(argument)
            case "/now" if argument:
                await self._say(argument, "steer", new_run_id(), now=True)
            case "/withdraw":
                await self._withdraw()
            case _:
                self._note(f"{command}: no such command, or its argument is missing; /help lists them")

    async def _open(self, name: str, what: str, *, remembered: int) -> None:
        """Go on in another session, which must exist."""
        await self._enter(name, {}, None, remembered=remembered)
        self._note(f"{what}: {name}, {self.transcript.model}")

    async def _sessions(self, words: str) -> None:
        """Show those that `/open` can open."""
        now_ms, rows = time.time() * 1000, list[tuple[str, str]]()
        async with aclosing(self._bus.sessions(tenant=self._tenant or None, words=words)) as sessions:
            async for info in sessions:
                if (info.tenant or "") == self._tenant:
                    age = time_span(max(0, round(now_ms - info.last_ms)))
                    rows.append((info.session, f"{age} ago, {info.provider}/{info.model}: {info.begins}"))
                if len(rows) == LISTED:
                    break
        width = max((len(name) for name, _ in rows), default=0)
        self._note("\n".join(f"{name:<{width}}  {' '.join(what.split())}" for name, what in rows) or "none")

    async def _model(self, chosen: str) -> None:
        if not chosen:
            self._note(f"{self.transcript.model} answers; /model PROVIDER[/MODEL] changes it")
            return
        provider, _, model = chosen.partition("/")
        config = self.transcript.config
        current = config.request.get("model") if config else None
        await self._configure({"provider": provider, "model": model or self.transcript.models.get(provider, current)})

    async def _configure(self, changes: Mapping[str, Any]) -> None:
        config = self.transcript.config
        assert config is not None  # since `_enter`
        await self.session.configure(
            {**config.request, **changes},
            when_busy=config.when_busy,
            together=config.together,
            history=config.history,
        )
        await noted_apart("session.configure", session=self.session.name)

    async def _withdraw(self) -> None:
        own = [append for append, message in self.transcript.waiting.items() if message.author == self._me]
        if not own:
            self._note("no message of yours waits")
            return
        await self.session.withdraw(own[-1])
        await noted_apart("session.withdraw", session=self.session.name, append=own[-1])


def _last(pieces: list[Piece], messages: int) -> list[Piece]:
    """The end of a conversation: its last messages, and everything after them."""
    starts = [n for n, piece in enumerate(pieces) if piece.kind == "said"]
    if len(starts) <= messages:
        return pieces
    earlier = Piece("note", f"… {len(starts) - messages} earlier messages")
    return [earlier, *pieces[starts[-messages] :]] if messages else []
