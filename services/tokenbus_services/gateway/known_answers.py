"""How clients that come back find the answer to what they said: its place in a session, under a name of theirs.

Any gateway finds it, so a client may resume at another one than it began at. What is kept is a key with a TTL in Redis.
"""

from __future__ import annotations

import re
from hashlib import sha256

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server, translated
from tokenbus.events.sessions import session_ref
from tokenbus_services.gateway.surfaces.contract import GatewayNote

ANSWER_TTL_S = 3600
"""As long as run logs are kept by default: after that there is nothing to join."""
MAX_BODY_BYTES = 2**20
"""Larger requests are not kept: many of them would fill the server."""
_NAME = re.compile(r"[A-Za-z0-9._:@~+=-]{1,128}")


class KnownAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the answer is that a client knows by a name of its own."""

    session: str
    append: str
    note: GatewayNote
    run: str = ""
    """Of an answer that goes on where another one ended: its run, which no append began."""
    after: int = -1
    """Where that is; see `Said.after`."""
    decided: list[str] = []
    missed: bool = False
    """Its client was refused, because somebody decided before: it may read the answer later, also after its end."""
    body: bytes = b""
    """The request, if the surface needs it to answer a client that joins."""


class KnownAnswers:
    """The answers of one surface, by tenant and the client's name."""

    def __init__(self, surface: str, *, server: Server, keys: Keys) -> None:
        self._surface = surface
        self._server = server
        self._keys = keys

    async def put(self, tenant: str, name: str, answer: KnownAnswer) -> None:
        """Store one, without a large body. Raises ServerUnavailable."""
        if len(answer.body) > MAX_BODY_BYTES:
            answer = msgspec.structs.replace(answer, body=b"")
        key, value = self._key(tenant, name), msgspec.msgpack.encode(answer)
        answers, now = self._keys.gateway_answers(session_ref(tenant, answer.session)), self._server.clock.now_ms()
        pipe = self._server.client.pipeline(transaction=False)
        # An erasure of the session finds it there.
        pipe.zadd(answers, {key: now})
        pipe.zremrangebyscore(answers, "-inf", now - ANSWER_TTL_S * 1000)
        pipe.expire(answers, ANSWER_TTL_S)
        pipe.set(key, value, ex=ANSWER_TTL_S)
        with translated(self._server):
            await pipe.execute()

    async def get(self, tenant: str, name: str) -> KnownAnswer | None:
        """The newest of this name. Raises ServerUnavailable."""
        with translated(self._server):
            value: bytes | None = await self._server.client.get(self._key(tenant, name))
        return msgspec.msgpack.decode(value, type=KnownAnswer) if value else None

    def _key(self, tenant: str, name: str) -> str:
        # A hash, because both names are the clients' own: neither may run into the other.
        parts = "".join(f"{len(part)}:{part}" for part in (tenant, name))
        return f"{self._keys.prefix}:{{gateway}}:{self._surface}:{sha256(parts.encode()).hexdigest()[:32]}"


def session_named(conversation: str) -> str:
    """The session of a conversation that a client names: of the same name, if a session can have it."""
    if _NAME.fullmatch(conversation):
        return conversation
    return f"named.{sha256(conversation.encode()).hexdigest()[:32]}"
