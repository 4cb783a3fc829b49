"""Bounds what one tenant's sessions and conversations take of the server, which keeps them for days."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from redis.asyncio import RedisCluster

from tokenbus.bus.scripts.limits import spend
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.errors import RequestInvalid
from tokenbus_services.settings import Settings

_LOOK_S = 60.0
"""How long the server's `maxmemory` is taken as known."""


class StorageShare:
    """Counts what each tenant writes of one kind."""

    def __init__(self, server: Server, settings: Settings, *, what: str, key: Callable[[str], str]) -> None:
        """``what``: its name in the error; ``key``: the hash that counts for a tenant."""
        self._server = server
        self._what = what
        self._key = key
        self._share = settings.limits.session_share
        self._keep_ms = round(settings.retention.session_s * 1000)
        self._maxmemory = 0
        self._look_at = 0.0

    async def spend(self, tenant: str, size: int) -> None:
        """Count these bytes for the tenant. Raises RequestInvalid if it has no room for them."""
        most = await self._most() if tenant and size > 0 else 0
        if not most:
            return
        call = spend(self._key(tenant), size=size, most=most, period_ms=self._keep_ms)
        wait_ms = await retry_until_available(
            self._server, lambda: run_script(self._server, call), what=f"room for {self._what}s"
        )
        if wait_ms:
            problem = f"the tenant's {self._what}s take all that `limits.session_share` allows"
            raise RequestInvalid(self._what, f"{problem}: there is room again in {wait_ms // 1000 + 1} s")

    async def _most(self) -> int:
        now = asyncio.get_running_loop().time()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            how: dict[str, Any] = {}
            if self._server.topology == "cluster":
                how["target_nodes"] = RedisCluster.PRIMARIES
            found = await retry_until_available(
                self._server, lambda: self._server.client.info("memory", **how), what="memory of the server"
            )
            nodes: list[dict[str, Any]] = list(found.values()) if how else [found]
            self._maxmemory = min((m for node in nodes if (m := int(node.get("maxmemory", 0)))), default=0)
        return round(self._maxmemory * self._share)
