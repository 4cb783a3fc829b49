"""The session of which a voice agent's turns are runs: what of the framework's context is new, and what was heard."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from tokenbus.client.sessions.session import Session
from tokenbus.errors import RequestInvalid, SessionNotFound
from tokenbus.integrations.chat_request import Json

LOOK_S = 0.02
_OF_ONE_RUN = ("id", "messages", "metadata")


class VoiceSession:
    """Puts the turns of one agent into a session, which it configures if there is none.

    A framework writes its whole context into each request; the session gets only what nobody has said to it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._configured: Mapping[str, object] | None = None
        self._said: list[bytes] = []
        """What was in the context before that is not the model's, as JSON."""

    async def say(self, request: Json) -> str:
        """Append what is new of the context, under the request's id; returns the run that answers once it has begun.

        The same request again is the same append. Raises as `Session.send`, and RequestInvalid if it is returned.
        """
        instructions, messages = _parted(request["messages"])
        before, new, said = self._new(messages)
        fields = {name: value for name, value in request.items() if name not in _OF_ONE_RUN}
        if instructions:
            fields["system"] = instructions
        known = await self._configuration(fields, before)
        changed = {name: value for name, value in fields.items() if name not in known or known[name] != value}
        receipt = await self._session.send(
            messages=new,
            request=changed,
            when_busy="enqueue",  # the run is this turn's alone
            metadata=request.get("metadata"),
            append=request["id"],
        )
        self._said, fate = said, receipt.fate
        while fate.state == "appended":  # behind the run of another one
            await asyncio.sleep(LOOK_S)
            fate = await self._session.fate(receipt.append) or fate
        if fate.run is None:
            raise RequestInvalid("append", f"the session returned it: {fate.reason}")
        return fate.run

    async def heard(self, run: str, through: int | None) -> None:
        """End the run, or cut it if it has ended: it was heard up to the event ``through``, -1 for nothing, None for
        not known. Without effect if there is a newer run. Raises as `Session.interrupt`.
        """
        receipt = await self._session.interrupt(heard_through=through, run=run)
        if receipt.fate.reason == "heard_too_far":  # a fail-over lost events that were spoken
            await self._session.interrupt(run=run)

    async def _configuration(self, fields: Json, before: Sequence[Json]) -> Mapping[str, object]:
        if self._configured is None:
            try:
                self._configured = (await self._session.configuration()).request
            except SessionNotFound:
                try:
                    await self._session.configure(fields, messages=before)
                except RequestInvalid:  # another one has made it meanwhile, or the fields are wrong
                    self._configured = (await self._session.configuration()).request
                else:
                    self._configured = fields
        return self._configured

    def _new(self, messages: list[Json]) -> tuple[list[Json], list[Json], list[bytes]]:
        """The context before what is new, what is new, and what is known then. After an edit of the context, all that
        follows the model's last message is new.
        """
        others = [(i, msgspec.json.encode(message)) for i, message in enumerate(messages) if not _is_models(message)]
        said = [text for _, text in others]
        known = len(self._said)
        if known and said[:known] == self._said and len(said) > known:
            at = others[known][0]
            return messages[:at], [messages[i] for i, _ in others[known:]], said
        models = [i for i, message in enumerate(messages) if _is_models(message)]
        at = models[-1] + 1 if models else 0
        return messages[:at], messages[at:], said


def _is_models(message: Json) -> bool:
    return message["role"] == "assistant"


def _parted(messages: Sequence[Json]) -> tuple[str, list[Json]]:
    """Instructions at the beginning of a context, and the rest."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return "\n\n".join(_text(message["content"]) for message in messages[:first]), list(messages[first:])


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in cast("list[Json]", content))
