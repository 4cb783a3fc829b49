"""Conversations of the Responses API: lists of items that a request continues by name, as JSON in the gateways' slot.

A response adds its input and its output once it has ended. Until then its run holds the conversation, so that two
responses never mix. Whoever needs the conversation next does that (`settle`), and so does every gateway from time to
time, because a run's log is not kept for as long as a conversation is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

import msgspec
import structlog

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness, rest, stop_task
from tokenbus.bus.scripts.gateway import put_key
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server, translated
from tokenbus.client.decode import is_end
from tokenbus.errors import ServerError
from tokenbus.events.public import Started
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.response_store import ResponseStore
from tokenbus_services.gateway.runs import note_in
from tokenbus_services.gateway.surfaces.openai_responses.response_log import ResponseSoFar
from tokenbus_services.runtime.storage_share import StorageShare
from tokenbus_services.settings import Settings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MAX_BYTES = 8 * 2**20
"""Of one conversation's items."""
LOST_MS = 300_000
"""A run of which nothing is there after this time does not come."""
LOOK_S = 20.0
"""How often a gateway looks for conversations whose run has ended."""
AT_ONCE = 100
_VALUE = "value"

Json = dict[str, Any]


Release = Callable[[], Awaitable[None]]


class Conversation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One conversation."""

    id: str
    created: int
    tenant: str = ""
    metadata: dict[str, str] = {}
    items: list[Json] = []
    run: str | None = None
    """The run that holds it."""
    since_ms: int = 0
    """When that began."""
    asked: list[Json] = []
    """The input of that run's response."""

    def shown(self) -> Json:
        """The object of the API."""
        return {"id": self.id, "object": "conversation", "created_at": self.created, "metadata": self.metadata}


class ConversationStore:
    """Reads and writes of one gateway. All methods raise ServerUnavailable."""

    def __init__(self, server: Server, settings: Settings) -> None:
        keys: Keys = settings.keys
        self._responses = ResponseStore(server, keys)
        self._server = server
        self._prefix = f"{keys.prefix}:{{gateway}}:conversation"
        self._keep_ms = round(settings.retention.session_s * 1000)
        """How long a conversation is kept after its last use."""
        self._share = StorageShare(
            server, settings, what="conversation", key=lambda tenant: f"{keys.prefix}:{{gateway}}:stored:{tenant}"
        )
        self._settling: asyncio.Task[None] | None = None

    async def open(self, liveness: Liveness) -> None:
        """Settle conversations in the background."""
        self._settling = liveness.start(self._settle_all(), name="conversations whose run has ended")

    async def close(self) -> None:
        """Stop; other gateways continue."""
        await stop_task(self._settling)

    async def create(self, tenant: str, conversation: Conversation) -> None:
        """Store a new one. Raises RequestInvalid if the tenant has no room for it."""
        key = self._key(tenant, conversation.id)
        with translated(self._server):
            await self._share.spend(tenant, len(msgspec.json.encode(conversation)))
            await self._put(key, b"", msgspec.structs.replace(conversation, tenant=tenant))

    async def get(self, tenant: str, name: str) -> Conversation:
        """The conversation, with what has ended. Raises Refusal (404)."""
        return await self._settled(self._key(tenant, name), name)

    async def change(self, tenant: str, name: str, change: Callable[[Conversation], Conversation]) -> Conversation:
        """Change it as it is then; ``change`` may be called again. Raises Refusal (400, 404), RequestInvalid if the
        tenant has no room for what is added, and what ``change`` raises.
        """
        key = self._key(tenant, name)
        await self._settled(key, name)
        return await self._change(key, name, change)

    async def claim(self, tenant: str, name: str, run: str, asked: Sequence[Json]) -> Release:
        """Let a run hold the conversation that is about to begin. Returns what undoes that. Raises Refusal (404; 409
        while another run holds it).
        """
        key, now = self._key(tenant, name), self._server.clock.now_ms()
        await self._settled(key, name)

        def held(found: Conversation) -> Conversation:
            if found.run not in (None, run):
                why = f"another response of the conversation {name!r} has not ended yet"
                problem = Problem(status=409, code="conversation_locked", message=why, kind="invalid_request")
                raise Refusal(msgspec.structs.replace(problem, retry_after_s=1.0))
            return msgspec.structs.replace(found, run=run, since_ms=now, asked=list(asked))

        with translated(self._server):
            await self._server.client.zadd(f"{self._prefix}:open", {key: now})
        await self._change(key, name, held)

        async def release() -> None:
            with suppress(Refusal):
                await self._change(key, name, lambda found: found if found.run != run else _freed(found))

        return release

    async def delete(self, tenant: str, name: str) -> None:
        """Remove it. Raises Refusal (404)."""
        key = self._key(tenant, name)
        with translated(self._server):
            if not await self._server.client.delete(key):
                raise not_found(name)
            await self._server.client.zrem(f"{self._prefix}:open", key)

    # ----------------------------------------------------------------------------------------------------------

    @staticmethod
    async def erase(server: Server, keys: Keys, tenant: str) -> int:
        """Delete all conversations of a tenant, and return how many. Reads the names of all keys. Raises redis-py's
        errors.
        """
        deleted = 0
        async for key in server.client.scan_iter(match=f"{keys.prefix}:{{gateway}}:conversation:*", count=1000):
            if key.endswith(b":open") or (found := await server.client.hget(key, _VALUE)) is None:
                continue
            if msgspec.json.decode(found, type=Conversation).tenant == tenant:
                deleted += await server.client.unlink(key)
        return deleted

    async def _settled(self, key: str, name: str) -> Conversation:
        """The conversation, after what its run said was added if that has ended."""
        _, found = await self._read(key, name)
        if found.run is None:
            return found
        output = await self._output(found.run, found.since_ms)
        if output is None:
            return found
        run, asked = found.run, found.asked

        def settled(now: Conversation) -> Conversation:
            if now.run != run:
                return now
            added = [*asked, *output] if output else []
            return msgspec.structs.replace(_freed(now), items=[*now.items, *added])

        found = await self._change(key, name, settled, bounded=False)
        with translated(self._server):
            await self._server.client.zrem(f"{self._prefix}:open", key)
        return found

    async def _output(self, run: str, since_ms: int) -> list[Json] | None:
        """What a run added, empty if it did not complete; None if it may still be open."""
        events = await self._responses.events_so_far(run)
        if not events or not is_end(events[-1]):
            is_new = self._server.clock.now_ms() - since_ms < LOST_MS  # the bus may not have taken it in yet
            return None if is_new or await self._responses.is_open(run) else []
        first = events[0]
        note = note_in(first.metadata) if isinstance(first, Started) else None
        if note is None:
            return []
        so_far = ResponseSoFar(note, run, None)
        for event in events:
            so_far.feed(event)
        response: Json = msgspec.json.decode(so_far.answer().body)
        return response["output"] if response["status"] in ("completed", "incomplete") else []

    async def _change(
        self, key: str, name: str, change: Callable[[Conversation], Conversation], *, bounded: bool = True
    ) -> Conversation:
        while True:
            before, found = await self._read(key, name)
            changed = change(found)
            size = len(msgspec.json.encode(changed))
            if bounded and size > MAX_BYTES:
                why = f"a conversation has at most {MAX_BYTES} bytes: begin another one"
                raise Refusal(Problem(status=400, code="conversation_full", message=why, kind="invalid_request"))
            with translated(self._server):
                if bounded:
                    await self._share.spend(found.tenant, size - len(before))
                if await self._put(key, before, changed):
                    return changed

    async def _put(self, key: str, before: bytes, conversation: Conversation) -> bool:
        entry = msgspec.json.encode(conversation)
        call = put_key(key, key_id=_VALUE, before=before, entry=entry)
        stored = before == entry or await run_script(self._server, call) == 1
        await self._server.client.pexpire(key, self._keep_ms)
        return stored

    async def _read(self, key: str, name: str) -> tuple[bytes, Conversation]:
        with translated(self._server):
            found: bytes | None = await self._server.client.hget(key, _VALUE)
        if found is None:
            raise not_found(name)
        return found, msgspec.json.decode(found, type=Conversation)

    async def _settle_all(self) -> None:
        while True:
            await rest(LOOK_S)
            with suppress(ServerError):
                with translated(self._server):
                    held: list[bytes] = await self._server.client.zrange(f"{self._prefix}:open", 0, AT_ONCE - 1)
                for key in held:
                    await self._settle_or_pass(key.decode())

    async def _settle_or_pass(self, key: str) -> None:
        """One that cannot be settled now comes last at the next look."""
        with translated(self._server):
            await self._server.client.zadd(f"{self._prefix}:open", {key: self._server.clock.now_ms()}, xx=True)
        try:
            found = await self._settled(key, "")
            over = found.run is None
        except Refusal:  # it was deleted, or has expired
            over = True
        except ServerError:
            raise
        except Exception:
            log.exception("conversation_not_settled")
            return
        if over:
            with translated(self._server):
                await self._server.client.zrem(f"{self._prefix}:open", key)

    def _key(self, tenant: str, name: str) -> str:
        # A hash, because both names are the clients' own: neither may run into the other.
        parts = "".join(f"{len(part)}:{part}" for part in (tenant, name))
        return f"{self._prefix}:{sha256(parts.encode()).hexdigest()[:32]}"


def _freed(conversation: Conversation) -> Conversation:
    return msgspec.structs.replace(conversation, run=None, since_ms=0, asked=[])


def not_found(name: str) -> Refusal:
    """No such conversation, or not one of this caller."""
    why = f"conversation {name[:200]!r} was not found"
    return Refusal(
        Problem(status=404, code="conversation_not_found", message=why, kind="not_found", param="conversation")
    )
