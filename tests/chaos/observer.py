"""Reads the result of a round from the server with plain commands: only what any program could read, and no product
code.
"""

from __future__ import annotations

import json
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from tests.chaos.record import Entry, KeyFact

TOPICS = ("visible", "chunks", "blocks", "runs", "decisions", "sessions")
STAGES = ("normalizer", "parser", "policy")


async def log_of(client: Redis, prefix: str, partition: int, run: str) -> list[Entry]:
    return await entries_of(client, f"{prefix}:{{{partition}}}:log:{run}")


async def topics_of(client: Redis, prefix: str, partitions: int) -> dict[str, list[list[Entry]]]:
    return {
        topic: [await entries_of(client, f"{prefix}:{{{n}}}:{topic}") for n in range(partitions)] for topic in TOPICS
    }


async def at_rest(client: Any, prefix: str, partitions: int) -> bool:
    """Whether no work is left: the queues are empty, and all entries are consumed."""
    pipe = client.pipeline(transaction=False)
    pipe.xlen(f"{prefix}:requests")
    for n in range(partitions):
        pipe.xlen(f"{prefix}:{{{n}}}:turns")
        pipe.xlen(f"{prefix}:{{{n}}}:tools")
    lengths = await pipe.execute()
    for n in range(partitions):
        for group in STAGES:
            pipe.hmget(f"{prefix}:{{{n}}}:lease:{group}", ["owner", "arrived", "done"])
    leases: list[list[bytes | None]] = await pipe.execute()
    return not any(lengths) and all(owner and arrived == done for owner, arrived, done in leases)


async def keys_of(client: Redis, prefix: str) -> list[KeyFact]:
    names = sorted({raw.decode() async for raw in client.scan_iter(match=f"{prefix}:*", count=1000)})
    facts = [await _fact(client, prefix, name) for name in names]
    return [fact for fact in facts if fact]


async def _fact(client: Any, prefix: str, name: str) -> KeyFact | None:
    """None if the key has expired."""
    kind = (await client.type(name)).decode()
    ttl_ms = await client.pttl(name)
    if ttl_ms == -2:
        return None
    sizes = {
        "hash": client.hlen,
        "stream": client.xlen,
        "zset": client.zcard,
        "list": client.llen,
        "string": client.strlen,
    }
    pending: dict[str, int] = {}
    fields: dict[str, str] = {}
    if kind == "stream":
        try:
            pending = {group["name"].decode(): group["pending"] for group in await client.xinfo_groups(name)}
        except ResponseError:
            if await client.exists(name):
                raise
            return None
    elif kind == "hash" and ":lease:" in name:
        # A lease also contains the notes of replay, which are msgpack.
        fields = {k.decode(): v.decode(errors="backslashreplace") for k, v in (await client.hgetall(name)).items()}
    length = await sizes[kind](name)
    if name == f"{prefix}:dead":  # each lost reply adds a copy, so a copy says nothing
        letters = [entry.event for entry in await entries_of(client, name)]
        length = len({(letter["stream"], letter["entry"]) for letter in letters})
    return KeyFact(name.removeprefix(f"{prefix}:"), kind, ttl_ms, length, pending, fields)


async def keys_with(client: Any, prefix: str, word: str) -> set[str]:
    """Every key of the deployment whose value has this word."""
    reads = {
        b"string": client.get,
        b"set": client.smembers,
        b"hash": client.hgetall,
        b"stream": client.xrange,
        b"zset": lambda key: client.zrange(key, 0, -1),
        b"list": lambda key: client.lrange(key, 0, -1),
    }
    found: set[str] = set()
    async for key in client.scan_iter(match=f"{prefix}:*", count=1000):
        kind = await client.type(key)
        if kind != b"none" and word in repr(await reads[kind](key)):
            found.add(key.decode())
    return found


async def entries_of(client: Any, key: str) -> list[Entry]:
    entries: list[Any] = await client.xrange(key)
    written = [(entry_id, fields) for entry_id, fields in entries if b"ballast" not in fields]
    return [Entry(entry_id.decode(), json.loads(fields[b"__data__"])) for entry_id, fields in written]
