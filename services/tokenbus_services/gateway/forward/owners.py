"""Whose the files and batches of a provider's account are: of the tenant that made them through the gateway."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server, translated
from tokenbus.events.requests import Generate
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.settings.tables.gateway import ForwardKind

OWNED: frozenset[ForwardKind] = frozenset({"files", "batches", "caches", "vector_stores"})
"""The kinds of what has an owner."""
KEPT_S = 366 * 86_400
"""How long an owner is remembered after the thing was last used through the gateway."""
UPLOAD_S = 2 * 86_400
"""How long an upload may take."""
MAX_NAMED = 100
"""Files and stores that one request may name."""
_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")
_NAMED = re.compile(
    rb'\\*"(?:(?:file_?[iI]d|file_?[uU]ri|file_name|fileName|cached_?[cC]ontent)\\*"\s*:\s*\\*"([^"\\]{1,500})'
    rb'|url\\*"\s*:\s*\\*"([^"\\]{1,500}/files/[^"\\/]{1,200})\\*")'
)
"""An id of a file or a store in a request, at any depth of JSON in texts. One of Gemini's files is a URL on the bus."""
_LISTED = re.compile(rb'\\*"(?:file|vector_?[sS]tore)_?[iI]ds\\*"\s*:\s*\[([^\]]{1,20000})\]')
_ITEM = re.compile(rb'"([^"\\]{1,500})')
_TICKET = "upload:"
"""In front of tickets: no id of a provider's begins so."""


class Owner(msgspec.Struct, frozen=True):
    tenant: str
    provider: str
    key: str | None = None
    """Of an upload: the id of the key that began it, and whose rules it is under."""
    url: str | None = None
    """Of an upload: where the provider takes its content."""


class Owners:
    """The table of owners, in the server."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._keys = keys

    async def add(self, caller: Caller, provider: str, ids: Iterable[str]) -> None:
        """What has these ids is the caller's from now on. Raises Refusal if one is somebody else's; ServerError."""
        owner = Owner(caller.tenant, provider)
        for one in ids:
            key = self._key(one)
            with translated(self._server, key):
                is_new: object = await self._server.client.set(key, msgspec.json.encode(owner), nx=True, ex=KEPT_S)
            if not is_new and await self._owner(one) != owner:
                why = f"the provider {provider} gave an id that is somebody else's already"
                raise Refusal(Problem(status=502, code="id_taken", message=why, kind="protocol"))

    async def of(self, caller: Caller, one: str, param: str) -> Owner | None:
        """The owner of what a request names: None if it was not made through the gateway.

        Raises Refusal (404) for what is not the caller's exactly as for what does not exist; ServerError.
        """
        owner = await self._owner(one) if _ID.fullmatch(one) else None
        if caller.operator:
            return owner
        if owner is None or owner.tenant != caller.tenant:
            why = f"there is no {one[:200]!r} of this key's tenant"
            raise Refusal(Problem(status=404, code="not_found", message=why, kind="not_found", param=param))
        with translated(self._server):
            await self._server.client.expire(self._key(one), KEPT_S)
        return owner

    async def begin_upload(self, caller: Caller, provider: str, url: str) -> str:
        """A ticket for the upload that goes on at this URL. Who has it uploads as the caller. Raises ServerError."""
        ticket = secrets.token_urlsafe(32)
        upload = Owner(caller.tenant, provider, caller.key, url)
        with translated(self._server):
            await self._server.client.set(self._key(_TICKET + ticket), msgspec.json.encode(upload), ex=UPLOAD_S)
        return ticket

    async def upload(self, ticket: str) -> Owner | None:
        """The upload that goes on with this ticket; None if there is none. Raises ServerError."""
        return await self._owner(_TICKET + ticket) if _ID.fullmatch(ticket) else None

    async def forget(self, one: str) -> None:
        """It does not exist any more. Raises ServerError."""
        with translated(self._server):
            await self._server.client.delete(self._key(one))

    async def check_run(self, caller: Caller, generate: Generate) -> None:
        """See `check`."""
        if not caller.operator:
            await self.check(caller, msgspec.json.encode(generate))

    async def check(self, caller: Caller, request: bytes) -> None:
        """Raise Refusal (404) if a request names a file or a store that another tenant made through the gateway.

        A text that only looks like an id, in the arguments of a tool say, is in no table.
        """
        if caller.operator:
            return
        named = {match[1] or match[2] for match in _NAMED.finditer(request)}
        named |= {item[1] for match in _LISTED.finditer(request) for item in _ITEM.finditer(match[1])}
        ids = {found for each in named if _ID.fullmatch(found := each.decode(errors="replace").rpartition("/")[2])}
        if len(ids) > MAX_NAMED:
            why = f"a request may name at most {MAX_NAMED} files and stores"
            raise Refusal(Problem(status=400, code="too_many_files", message=why, kind="invalid_request"))
        for one in ids:
            owner = await self._owner(one)
            if owner is not None and owner.tenant != caller.tenant:
                why = f"there is no file {one!r} of this key's tenant"
                raise Refusal(Problem(status=404, code="not_found", message=why, kind="not_found"))

    async def _owner(self, one: str) -> Owner | None:
        key = self._key(one)
        with translated(self._server, key):
            stored: bytes | None = await self._server.client.get(key)
        return None if stored is None else msgspec.json.decode(stored, type=Owner)

    def _key(self, one: str) -> str:
        return self._keys.gateway_owner(one)
