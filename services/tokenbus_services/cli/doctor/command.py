"""`tokenbus doctor`: examines a deployment and shows the findings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tokenbus.blob_wire import DEPLOYMENT_ENV
from tokenbus.bus.server.server import Server, translated
from tokenbus.client.local_up import running_in
from tokenbus.errors import ServerError, SettingsError
from tokenbus_services import settings as configuration
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.doctor import checks, checks_work
from tokenbus_services.cli.doctor.checks import Finding
from tokenbus_services.cli.doctor.checks_settings import check_settings
from tokenbus_services.cli.doctor.examine_bus import (
    examine_addresses,
    examine_archive,
    examine_blobs,
    examine_bus,
    examine_disk,
    try_provider_keys,
)
from tokenbus_services.cli.render import output


def run(*, as_json: bool, ask_providers: bool, try_keys: bool) -> int:
    """Run all checks and show the findings; return the exit code."""
    findings = checks.one_hint_per_cause(asyncio.run(examine(ask_providers=ask_providers, try_keys=try_keys)))
    show(findings, as_json=as_json)
    return 0 if checks.none_wrong(findings) else ending.OTHER


async def examine(*, ask_providers: bool = False, try_keys: bool = False) -> list[Finding]:
    """Return all findings; a server that does not answer is one of them."""
    try:
        settings = configuration.load()
    except SettingsError as e:
        return [Finding(level="wrong", about="settings", says=str(e), todo="fix it: nothing starts with these")]
    found = [Finding(level="ok", about="settings", says=os.environ.get("TOKENBUS_CONFIG") or "defaults")]
    try:
        settings = reaching.with_server(settings)
        assert settings.redis_url
        async with Server(settings.redis_url) as server:
            with translated(server):
                found += [finding async for finding in examine_bus(server, settings)]
    except (ServerError, SettingsError) as e:
        found.append(Finding(level="wrong", about="server", says=str(e), todo=checks.server_todo(e)))
    found += (finding for finding in check_settings(settings, os.environ) if finding.level != "ok")
    found += checks_work.check_providers(settings, os.environ)
    if ask_providers:
        found += await examine_addresses(settings)
    if try_keys:
        found += [finding async for finding in try_provider_keys(settings, os.environ)]
    up = running_in(Path(settings.data_dir))
    found += await examine_blobs(settings.blobs, os.environ.get(DEPLOYMENT_ENV, "") or (up.deployment if up else ""))
    found += await examine_archive(settings)
    return [*found, *examine_disk(Path(settings.data_dir))]


# Shows findings: as a table, as lines or as JSON.


def show(findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    elif console := output.console():
        console.print(_table(findings))
    else:
        for line in lines(findings):
            print(output.safe(line))


def lines(findings: list[Finding]) -> Iterator[str]:
    """Yield a line per finding, and one for what to do."""
    for finding in findings:
        yield f"{finding.level:5} {finding.about}: {finding.says}"
        if finding.todo:
            yield f"      → {finding.todo}"


def _table(findings: list[Finding]) -> Any:
    from rich.table import Table
    from rich.text import Text

    signs = {"ok": ("✓", "green"), "note": ("•", "yellow"), "wrong": ("✗", "bold red")}
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        sign, style = signs[finding.level]
        says = Text(output.safe(finding.says))
        if finding.todo:
            says.append(f"\n{finding.todo}", style="cyan")
        table.add_row(Text(sign, style=style), Text(finding.about, style="bold"), says)
    return table
