"""The parts of a gateway with keys: its access control, the counter of spend, and the admin API."""

from __future__ import annotations

from collections.abc import Mapping

from tokenbus import Client
from tokenbus.bus.server.server import Server
from tokenbus_services.gateway.budgets.counter import SpendCounter
from tokenbus_services.gateway.keys.access import KeyAccess
from tokenbus_services.gateway.keys.admin import AdminServer
from tokenbus_services.gateway.keys.allowed import Aliases
from tokenbus_services.gateway.keys.directory import KeyDirectory, check_keys
from tokenbus_services.gateway.keys.store import KeyStore
from tokenbus_services.gateway.service import GatewayPart
from tokenbus_services.gateway.surfaces.contract import TranslationRules
from tokenbus_services.pricing import PriceTable
from tokenbus_services.settings import Settings

_COUNTED_KEPT_MS = 2 * 3_600_000


def keyed_parts(
    settings: Settings,
    server: Server,
    bus: Client,
    *,
    rules: TranslationRules,
    aliases: Aliases,
    env: Mapping[str, str],
) -> tuple[KeyAccess, list[GatewayPart]]:
    """Access control, and what works beside it. Raises SettingsError for keys and an admin API that cannot work."""
    table = settings.gateway
    assert table
    check_keys(table.keys)
    store = KeyStore(server, settings.keys)
    directory = KeyDirectory(table.keys, store)
    prices = PriceTable(table.prices)
    # Events come again until the group has acknowledged them, at the latest when a gateway is back; a run may be open
    # for as long as its keys are kept.
    keep_ms = _COUNTED_KEPT_MS + round(1000 * (settings.retention.open_run_s + settings.retention.finished_run_s))
    access = KeyAccess(
        settings, server, directory=directory, rules=rules, aliases=aliases, prices=prices, keep_ms=keep_ms
    )
    counter = SpendCounter(
        server,
        bus,
        settings.keys,
        prices=prices,
        apis={name: provider.api for name, provider in settings.providers.items()},
        rules_of=directory.rules_of,
        keep_ms=keep_ms,
    )
    parts: list[GatewayPart] = [counter]
    if table.admin:
        parts.append(AdminServer(settings, table.admin, server, store, env))
    return access, parts
