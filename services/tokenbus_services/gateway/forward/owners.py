"""Whose the files and batches of a provider's account are: of the tenant that made them through the gateway."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import cast
from urllib.parse import unquote

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server, translated
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
_NAMES = re.compile(r"(?:\w*_)?file_?[iI]d|file_?[uU]ri|file_name|fileName|cached_?[cC]ontent")
"""Members of an object that name a file or a store; one of Gemini's files is a URL on the bus."""
_LISTS = re.compile(r"(?:\w*_)?(?:file|vector_?[sS]tore)_?[iI]ds")
"""Members that list some."""
_MAY_NAME = re.compile(rb"ile_?[iI]d|ile_?[uU]ri|ile_?[nN]ame|ached_?[cC]ontent|tore_?[iI]ds|files|%|\\u00")
"""What every JSON has that names one; any other is not read."""
MOST_CHARS, MOST_WORDS = 1000, 1000
"""Of one name, and of all of them: what could be an id is looked up."""
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

    def __init__(self, server: Server, keys: Keys, *, forward: Collection[ForwardKind]) -> None:
        """``forward``: the kinds that the gateway forwards. Without those of `OWNED` nothing has an owner."""
        self._server = server
        self._keys = keys
        self._known = not OWNED.isdisjoint(forward)

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

    async def check_run(self, caller: Caller, request: object) -> None:
        """See `check`. Everything that a tenant brings into a run or into the history of a session passes here."""
        if self._known and not caller.operator:
            await self.check(caller, msgspec.json.encode(request))

    async def check(self, caller: Caller, request: bytes) -> None:
        """Raise Refusal (404) if a request names a file or a store that another tenant made through the gateway.

        A text that only looks like an id, in the arguments of a tool say, is in no table.
        """
        if caller.operator:
            return
        named = list(islice(names_in(request), MAX_NAMED + 1))
        words = {word for each in named for word in _ID.findall(unquote(each))}
        if len(named) > MAX_NAMED or len(words) > MOST_WORDS or any(len(each) > MOST_CHARS for each in named):
            why = f"a request may name at most {MAX_NAMED} files and stores, each with at most {MOST_CHARS} characters"
            raise Refusal(Problem(status=400, code="too_many_files", message=why, kind="invalid_request"))
        if not words:
            return
        ids = sorted(words)
        keys = [self._key(one) for one in ids]
        with translated(self._server, keys[0]):
            found: list[bytes | None] = await self._server.client.mget(keys)
        for one, stored in zip(ids, found, strict=True):
            if stored is not None and msgspec.json.decode(stored, type=Owner).tenant != caller.tenant:
                why = f"there is no file {one!r} of this key's tenant"
                raise Refusal(Problem(status=404, code="not_found", message=why, kind="not_found"))

    async def _owner(self, one: str) -> Owner | None:
        key = self._key(one)
        with translated(self._server, key):
            stored: bytes | None = await self._server.client.get(key)
        return None if stored is None else msgspec.json.decode(stored, type=Owner)

    def _key(self, one: str) -> str:
        return self._keys.gateway_owner(one)


def names_in(request: bytes) -> Iterator[str]:
    """Yield what a request names as files and stores: in its members, and in those of JSON in its texts, because what
    a provider wants back with a block is text here, and part of the request there. Raises Refusal.
    """
    waiting: list[object] = [request]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            value = value.encode(errors="replace") if value.lstrip()[:1] in ("{", "[") else b""
        if isinstance(value, bytes):
            if _MAY_NAME.search(value):
                waiting.append(_read(value))
        elif isinstance(value, _Members):
            for name, of in value:
                yield from _named_by(name, of)
                waiting.append(of)
        elif isinstance(value, list):
            waiting += cast("list[object]", value)


class _Members(list[tuple[str, object]]):
    """The members of an object, with those of the same name, of which a provider may take any."""


def _read(text: bytes) -> object:
    try:
        return json.loads(text, object_pairs_hook=_Members)
    except RecursionError:
        raise Refusal(
            Problem(status=400, code="too_deep", message="JSON in a text is too deep", kind="invalid_request")
        ) from None
    except ValueError:
        return None


def _named_by(name: str, value: object) -> Iterator[str]:
    if isinstance(value, str) and not value.startswith("data:"):
        if _NAMES.fullmatch(name) or (name == "url" and "files" in unquote(value)):
            yield value
    elif isinstance(value, list) and _LISTS.fullmatch(name):
        yield from (item for item in cast("list[object]", value) if isinstance(item, str))
