"""Turns of a voice agent. Each is one run, even if the framework requests it again, and is cancelled with the position
up to which it was spoken."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from tokenbus.client.client import Client
from tokenbus.client.publishing import new_run_id
from tokenbus.client.sessions.session import Session
from tokenbus.errors import Malformed, RequestInvalid, RunCancelled, RunFailed, RunIncomplete, ServerError
from tokenbus.events import public
from tokenbus.events.usage import Usage
from tokenbus.integrations.spoken_text import SpokenText
from tokenbus.integrations.voice_session import VoiceSession

_log = logging.getLogger(__name__)

INTERRUPTED = "interrupted"
"""Reason of a cancel because the listener spoke."""
HEARD_WAIT_S = 1.0
"""How long an interrupted turn whose speech had begun waits for the framework to say what was spoken."""
RECENT = 8
CANCEL_TRIES, CANCEL_PAUSE_S = 20, 0.5
HEARD = "heard"
"""Key in a run's metadata: how much of the previous run the listener heard."""


class VoiceTurn:
    """One turn of the model."""

    def __init__(self, bus: Client, request: dict[str, Any], session: VoiceSession | None = None) -> None:
        self.run: str = request["id"]
        """Its id; in a session, which gives its runs their ids, only once it has begun."""
        self.heard = SpokenText()
        self.calls: list[public.BlockComplete] = []
        """Calls that the framework has to run; complete once the turn has ended."""
        self.usage = Usage()
        self.ended = False
        self.left = False
        self.sounded = False
        """Whether the agent was speaking at some time since the turn began."""
        self.spoken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The spoken part, once the framework has reported it."""
        self.begun = False
        """Whether a request may have been sent."""
        self._bus = bus
        self._request = request
        self._session = session
        self._runs_calls = request.get("max_tool_depth") == 0
        self._published = False
        self._seq = -1
        self._text_of: int | None = None

    async def texts(self) -> AsyncGenerator[str]:
        """Yield the visible text as it arrives. Another iteration continues where the previous one broke off.

        Publishes the run if it is not published yet. Raises RunFailed, RunIncomplete, RunCancelled, and the errors of
        `publish` and `Client.follow`.
        """
        await self.publish()
        async with aclosing(self._bus.follow(self.run, after=self._seq)) as events:
            async for event in events:
                self._seq = event.seq
                for text in self._texts_of(event):
                    yield text
        if not self.ended:
            raise Malformed(f"run {self.run}", "it ended in a way that this version of tokenbus does not know")

    async def publish(self) -> None:
        """Begin the run, once, however often it is called. Raises as `Client.publish` or `VoiceSession.say`."""
        if self._published:
            return
        self.begun = True
        if self._session is not None:
            self.run = await self._session.say(self._request)
        else:
            await self._bus.publish(self._request)  # the same id: the same run, if an earlier try arrived
        self._published = True

    @property
    def through(self) -> int | None:
        """Seq of the last chunk that the listener heard, -1 for nothing; None: not known."""
        if self.spoken.done():
            return self.heard.through(self.spoken.result())
        return None if self.sounded else -1

    def _texts_of(self, event: public.PublicEvent) -> list[str]:
        match event:
            case public.Chunk(kind="text", visible=True, text=text) if text:
                seam = ["\n\n"] if self._text_of not in (None, event.turn) else []
                self._text_of = event.turn
                self.heard.add(event.seq, text)
                return [*seam, text]
            case public.BlockComplete(kind="tool_call", cut=None) if self._runs_calls:
                self.calls.append(event)
            case public.Retrying(drop_from=block):
                self.calls = [call for call in self.calls if call.block < block]
            case _ if isinstance(event, public.TERMINAL):
                self._end(event)
            case _:
                pass
        return []

    def _end(self, end: public.PublicEvent) -> None:
        self.ended = True
        match end:
            case public.RunFailedEvent(error=error):
                raise RunFailed(self.run, error)
            case public.Incomplete(reason=reason):
                raise RunIncomplete(self.run, reason)
            case public.Cancelled(reason=reason):
                raise RunCancelled(self.run, reason)
            case _:
                self.usage = getattr(end, "usage", None) or Usage()


class VoiceTurns:
    """The turns of one agent, one after the other."""

    def __init__(
        self,
        bus: Client,
        *,
        told_of_speech: bool,
        heard_wait_s: float = HEARD_WAIT_S,
        session: Session | None = None,
    ) -> None:
        """``told_of_speech``: whether `spoken` and `speaks` are called. ``heard_wait_s``: how long a turn that was
        interrupted waits for the former before it is cancelled. ``session``: the turns are runs of it.
        """
        self._session = VoiceSession(session) if session is not None else None
        self.told_of_speech = told_of_speech
        self._bus = bus
        self._heard_wait_s = heard_wait_s
        self._recent: deque[VoiceTurn] = deque(maxlen=RECENT)
        self._leaving: set[asyncio.Task[None]] = set()
        self._speaking = False
        self._hung_up = asyncio.Event()

    def begin(self, request: dict[str, Any]) -> VoiceTurn:
        """A turn with this request. Its metadata say how much of the previous turn was heard. Raises RequestInvalid."""
        if request.get("on_failure") == "restart":
            raise RequestInvalid("on_failure", "'restart' takes text back, and it may be spoken already")
        metadata = dict(request.get("metadata") or {})
        before = self._recent[-1] if self._recent else None
        in_history = self._session is not None  # which holds what was heard
        if (
            before
            and not in_history
            and (before.spoken.done() or before.left)
            and before.through is not None
            and self.told_of_speech
        ):
            metadata.setdefault(HEARD, {"run": before.run, "through": before.through})
        request = {"max_added_ms": 0, **request, "id": new_run_id(), **({"metadata": metadata} if metadata else {})}
        turn = VoiceTurn(self._bus, request, self._session)
        turn.sounded = self._speaking
        self._recent.append(turn)
        return turn

    def speaks(self, speaking: bool) -> None:
        """The agent's voice begins or ends. It says the newest turn that has text, after those before it that called
        tools.
        """
        self._speaking = speaking
        for turn in reversed(self._recent if speaking else ()):
            if turn.heard:
                turn.sounded = True
            if turn.heard and not turn.calls:
                break

    async def ready(self) -> None:
        """Before a turn is published: those before it are left, so that the session's history is what was heard."""
        if self._session is not None:
            await asyncio.gather(*self._leaving, return_exceptions=True)

    def spoken(self, text: str, *, interrupted: bool) -> None:
        """So much was spoken of a turn: of those that sounded and are not reported yet, the oldest that fits best.
        ``interrupted``: and no more will be.
        """
        unreported = [turn for turn in self._recent if turn.sounded and not turn.spoken.done()]
        turn = max(unreported, key=lambda turn: turn.heard.overlap(text), default=None)
        if turn and turn.heard.overlap(text):
            turn.spoken.set_result(text)
            if self._session is not None and interrupted and turn.ended and not turn.left:
                self._leave(turn)

    def hang_up(self) -> None:
        """The listener is gone: nothing more is reported."""
        self._hung_up.set()

    def leave(self, turn: VoiceTurn) -> None:
        """Cancel a turn that has not ended, once its spoken part is known."""
        if not turn.ended and not turn.left:
            self._leave(turn)

    def _leave(self, turn: VoiceTurn) -> None:
        turn.left = True
        task = asyncio.create_task(self._cancel(turn), name=f"cancel of {turn.run}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def aclose(self) -> None:
        """Send the cancels that are due, at once."""
        self.hang_up()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _cancel(self, turn: VoiceTurn) -> None:
        heard = await self._heard(turn)
        for n in range(CANCEL_TRIES):
            try:
                if self._session is None:
                    await self._bus.cancel(turn.run, INTERRUPTED, heard_through=heard)
                elif turn.begun:
                    await turn.publish()  # its answer, which has the run's id, may have been cut off
                    await self._session.heard(turn.run, heard)
                return
            except RequestInvalid:
                if self._session is not None:  # it has never begun
                    return
                heard = None  # a fail-over lost events that were spoken
            except ServerError as e:
                if n == CANCEL_TRIES - 1:
                    _log.warning("run %s was not cancelled: %s", turn.run, e)
            await asyncio.sleep(CANCEL_PAUSE_S)

    async def _heard(self, turn: VoiceTurn) -> int | None:
        if not turn.heard:
            return -1
        if not self.told_of_speech:
            return None
        if turn.sounded and not turn.spoken.done():
            gone = asyncio.ensure_future(self._hung_up.wait())
            waits = {turn.spoken, gone}
            await asyncio.wait(waits, timeout=self._heard_wait_s, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
        return turn.through
