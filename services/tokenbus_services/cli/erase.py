"""`tokenbus erase`: deletes runs, sessions, all of a tenant or of a time, and shows what is left."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, cast

import msgspec

from tokenbus import Client
from tokenbus.bus.erase import erase_runs, remains, topic_entries, with_children
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import has_archive
from tokenbus.bus.records import newest_records
from tokenbus.bus.server.server import Server, translated
from tokenbus.client.archive import Archive
from tokenbus.core.request.bounds import tenant_of
from tokenbus.errors import BlobNotFound
from tokenbus.events.sessions import session_ref
from tokenbus_services.blobs.client import HttpBlobs, archive_of, loader_of
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.audit import noted
from tokenbus_services.cli.render import output
from tokenbus_services.gateway.conversation_store import ConversationStore
from tokenbus_services.settings import BlobSettings

NAMED = 20
"""So many runs are named in the audit; of more their number."""
PAGE = 50
_BLOB = re.compile(rb"sha256:[0-9a-f]{64}")


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What to erase. Runs and sessions of a tenant alone, if there is one; of all times, unless times are given."""

    runs: tuple[str, ...] = ()
    session: str | None = None
    tenant: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None

    @property
    def of_many(self) -> bool:
        """Whether it takes everything of a tenant or of a time."""
        return not self.runs and self.session is None

    @property
    def of_whole_tenant(self) -> bool:
        """Whether it takes everything of a tenant, whenever it was."""
        return self.of_many and self.tenant is not None and self.since_ms is None and self.until_ms is None

    def within(self, begun_ms: int, ended_ms: int) -> bool:
        """Whether something that lasted so long lies in the chosen time."""
        return (self.since_ms is None or begun_ms >= self.since_ms) and (
            self.until_ms is None or ended_ms <= self.until_ms
        )


class _Started(msgspec.Struct):
    run: str = ""
    type: str = ""
    metadata: dict[str, Any] | None = None


_started = msgspec.json.Decoder(_Started)


async def run(choice: Choice, *, dry_run: bool, rewrite: bool, as_json: bool) -> int:
    """Erase, search again, and print both. Returns the exit code: 1 if something is left, or still open.

    ``rewrite``: let the server rewrite its append-only file, which has what was deleted until then.
    """
    async with reaching.deployment() as (settings, server, keys), reaching.client() as bus:
        with translated(server):
            sessions = [each async for each in _sessions(bus, choice)]
            chosen = {each async for each in _runs(bus, server, keys, choice, sessions)}
            runs = await with_children(server, keys, chosen)
            refs = [session_ref(tenant, name) for tenant, name in sessions]
            facts: dict[str, Any] = {"runs": len(runs), "sessions": len(sessions)}
            archive = archive_of(settings.blobs) if await has_archive(server, keys) else None
            if dry_run:
                found = await remains(server, keys, runs, refs)
                found["archived logs"] = await _archived(archive, choice, runs) if archive else 0
                _print({**facts, "found": found}, as_json=as_json)
                return 0
            blobs, others = await _blobs_of(bus, server, keys, runs)
            for tenant, name in sessions:
                await bus.session(name, tenant=tenant).delete()
            erased = await erase_runs(server, keys, runs, refs)
            if archive:
                erased.found["archived logs"], more = await _erase_archived(archive, choice, runs - set(erased.open))
                blobs = {blob_id for blob_id in blobs | more - others if not await archive.names(blob_id)}
            if choice.of_many and choice.tenant:
                erased.found["conversations"] = await ConversationStore.erase(server, keys, choice.tenant)
            erased.found["blobs"], kept = await _erase_blobs(settings.blobs, blobs)
            left = await remains(server, keys, runs - set(erased.open), refs)
            if archive:
                left["archived logs"] = await _archived(archive, choice, runs - set(erased.open))
            named = {"names": sorted(runs)} if len(runs) <= NAMED else {}
            asked = {name: value for name, value in msgspec.to_builtins(choice).items() if value and name != "runs"}
            facts |= {"erased": erased.found, "open": erased.open, "left": +left, "blobs_left": kept}
            await noted(server, keys, "erase", **asked, **named, **facts)
            if rewrite:
                await server.client.bgrewriteaof()
            facts |= {"still": await _elsewhere(server)}
    _print(facts, as_json=as_json)
    return ending.OTHER if left.total() or erased.open or kept else 0


async def _sessions(bus: Client, choice: Choice) -> AsyncIterator[tuple[str, str]]:
    """Tenant and name of each chosen session."""
    if choice.session is not None:
        yield choice.tenant or "", choice.session
    elif choice.of_many:
        async with aclosing(bus.sessions(tenant=choice.tenant)) as found:
            async for info in found:
                if choice.within(info.begun_ms, info.last_ms):
                    yield info.tenant or "", info.session


async def _runs(
    bus: Client, server: Server, keys: Keys, choice: Choice, sessions: Iterable[tuple[str, str]]
) -> AsyncIterator[str]:
    """The chosen runs, also those of which only events or a record are left."""
    for name in choice.runs:
        yield name
    refs = tuple(f"{session_ref(tenant, name)}." for tenant, name in sessions)
    if not (refs or choice.of_many):
        return
    tenant = choice.tenant if choice.of_many else None
    async with aclosing(bus.runs(tenant=tenant, archived=True)) as found:
        async for info in found:
            if info.run.startswith(refs) or (
                choice.of_many and choice.within(info.accepted_ms, info.ended_ms or info.accepted_ms)
            ):
                yield info.run
    async for entry in newest_records(server, keys):
        of_tenant = tenant is None or entry.tenant == tenant
        if entry.run.startswith(refs) or (choice.of_many and of_tenant and choice.within(entry.at_ms, entry.at_ms)):
            yield entry.run
    for partition in range(keys.partitions):
        async for entry_id, data in topic_entries(server, keys.topic(partition, "runs")):
            try:
                event = _started.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            at_ms = int(entry_id.split("-")[0])
            of_tenant = tenant is None or tenant_of(event.metadata) == tenant
            if event.type == "started" and (
                event.run.startswith(refs) or (choice.of_many and of_tenant and choice.within(at_ms, at_ms))
            ):
                yield event.run


# The archive, which has logs of runs that the server forgot. What it has is erased after the server's copy, so that no
# recorder archives it again.


async def _erase_archived(archive: Archive, choice: Choice, runs: set[str]) -> tuple[int, set[str]]:
    """How many logs were deleted, and the blobs that no other archived log names."""
    count, named = 0, set[str]()
    for name in sorted(runs):
        gone = await archive.delete_log(name)
        count += gone.logs
        named.update(gone.blobs)
    if choice.of_whole_tenant:  # those whose key is gone too, of which nobody knows when they began
        count += await archive.delete_logs(tenant=choice.tenant)
    return count, named


async def _archived(archive: Archive, choice: Choice, runs: set[str]) -> int:
    """How many logs the archive has of these runs, and of what else was chosen."""
    count = 0
    for name in sorted(runs):
        if log := await archive.open_log(name):
            await log.aclose()
            count += 1
    if choice.of_many:
        async with aclosing(archive.runs(tenant=choice.tenant, since_ms=choice.since_ms or 0)) as found:
            more = [info async for info in found if info.run not in runs]
        count += sum(choice.within(info.accepted_ms, info.at_ms) for info in more)
    return count


# Blobs are shared: the same image may be in a run that stays.


async def _blobs_of(bus: Client, server: Server, keys: Keys, runs: set[str]) -> tuple[set[str], set[str]]:
    """The blobs that these runs name and no other run, session or record on the server does; those that others do."""
    ours: set[str] = set()
    others: set[str] = set()
    async for entry in newest_records(server, keys):
        (ours if entry.run in runs else others).update((entry.blob_id, *entry.parts))
    listed = [info.run async for info in bus.runs()]
    for at in range(0, len(listed), PAGE):
        some = listed[at : at + PAGE]
        for name, found in zip(some, await _named_by(server, keys, some), strict=True):
            (ours if name in runs else others).update(found)
    gone = {name.rpartition(".")[0].rpartition(".")[0] for name in runs if name.startswith("s.")}
    async for info in bus.sessions():
        ref = session_ref(info.tenant or "", info.session)
        if ref not in gone:
            session = server.client.hvals(keys.session(ref)), server.client.hvals(keys.of_session(ref)[3])
            others.update(*[_in([value for values in session for value in await values])])
    return ours - others, others


async def _named_by(server: Server, keys: Keys, runs: list[str]) -> list[set[str]]:
    pipe = server.client.pipeline(transaction=False)
    for name in runs:
        pipe.hvals(keys.run(name))
        pipe.xrange(keys.log(name))
    replies: list[Any] = await pipe.execute()
    return [
        _in([*replies[n], *(value for _, fields in replies[n + 1] for value in fields.values())])
        for n in range(0, len(replies), 2)
    ]


def _in(values: Iterable[bytes]) -> set[str]:
    return {found.decode() for value in values for found in _BLOB.findall(value)}


async def _erase_blobs(settings: BlobSettings, blobs: set[str]) -> tuple[int, int]:
    """How many were deleted, and how many a store of the deployment's own keeps: it knows how."""
    store = loader_of(settings)
    try:
        if not isinstance(store, HttpBlobs):
            return 0, len(blobs)
        deleted = 0
        for blob_id in blobs:
            try:
                await store.delete(blob_id)
                deleted += 1
            except BlobNotFound:
                continue  # it has expired
        return deleted, 0
    finally:
        await store.aclose()


async def _elsewhere(server: Server) -> list[str]:
    """Where the server's machine still has what was deleted, and until when."""
    cluster = server.topology == "cluster"
    where: dict[str, Any] = {"target_nodes": server.client.PRIMARIES} if cluster else {}
    found: Any = await server.client.info("persistence", **where)
    said: list[str] = []
    for name, info in found.items() if cluster else [(server.url.safe, found)]:
        if info.get("aof_enabled"):
            rewriting = "which is under way" if info.get("aof_rewrite_in_progress") else "`--rewrite` begins one"
            said.append(f"{name}: its append-only file has it until the next rewrite; {rewriting}")
        saved = datetime.fromtimestamp(info.get("rdb_last_save_time", 0), UTC)
        said.append(f"{name}: a snapshot of {saved:%Y-%m-%d %H:%M:%S}Z or earlier has it until the next one")
    return [*said, "backups of the server and of the blob store: as long as you keep them"]


def _print(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.print_json(facts)
        return
    for name, value in facts.items():
        lines = value if name == "still" else [_short(value)]
        for line in lines:
            print(output.safe(f"{name.replace('_', ' ')}: {line}"))
    sys.stdout.flush()


def _short(value: Any) -> str:
    if isinstance(value, dict):
        counts = cast("dict[str, int]", value)
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"
    return ", ".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else str(value)
