"""`tokenbus keys …` and `tokenbus spend`: keys of the gateway's clients."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from tokenbus_services.cli.commands.runs import json_lines


@click.group()
def keys() -> None:
    """Manage the keys of the gateway's clients. A key is shown once, when it is made; only its hash is stored."""


def _roles(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...]:
    """The roles, which `rules_from` checks."""
    return tuple(role.strip() for role in (text or "").split(",") if role.strip())


_lifetime = click.option(
    "--days", type=click.FloatRange(min=0, min_open=True), help="Lifetime in days. Default: unlimited."
)


@keys.command("create")
@click.argument("name")
@click.option("--tenant", default="", help="Tenant of its runs. Default: the key's id.")
@click.option("--model", "models", multiple=True, help="A model or alias that it may use (repeatable; * for any text).")
@click.option("--surface", "surfaces", multiple=True, help="A protocol that it may use (repeatable).")
@click.option("--policy", "policies", multiple=True, help="A policy that judges all its runs (repeatable).")
@click.option("--max-tokens", type=click.IntRange(1), help="Maximum max_tokens of a request.")
@click.option("--rpm", "rpm_limit", type=click.IntRange(1), help="Requests per minute.")
@click.option("--tpm", "tpm_limit", type=click.IntRange(1), help="Tokens per minute.")
@click.option(
    "--parallel", "max_parallel_requests", type=click.IntRange(1), help="Maximum answers in progress at once."
)
@click.option(
    "--budget", "max_budget", type=click.FloatRange(min=0, min_open=True), help="Maximum spend per --per, or in total."
)
@click.option("--per", "budget_duration", type=click.Choice(["day", "week", "month"]), help="Period of the budget.")
@click.option(
    "--console",
    callback=_roles,
    metavar="ROLE,…",
    help="What it may do in the console: see_runs, see_content, act, decide, admin.",
)
@click.option("--operator", is_flag=True, help="May see the runs of all tenants.")
@click.option(
    "--settings", "in_settings", is_flag=True, help="Print a table for the settings instead of storing the key."
)
@_lifetime
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def keys_create(name: str, in_settings: bool, days: float | None, as_json: bool, **rules: Any) -> None:
    """Make a key for the client NAME, and print it."""
    from tokenbus_services.cli.keys import create, for_settings, rules_from

    if in_settings:
        for_settings(name, rules_from(rules))
    else:
        lifetime_s = None if days is None else days * 86_400
        asyncio.run(create(rules_from(rules), name=name, lifetime_s=lifetime_s, as_json=as_json))


@keys.command("list")
@json_lines
def keys_list(as_json: bool) -> None:
    """List all keys: those in the settings and those made by commands or the admin API."""
    from tokenbus_services.cli.keys import listing

    asyncio.run(listing(as_json=as_json))


@keys.command("rotate")
@click.argument("key_id", metavar="KEY")
@click.option("--grace-hours", type=click.FloatRange(min=0), default=24.0, help="Hours that earlier keys stay valid.")
@_lifetime
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def keys_rotate(key_id: str, grace_hours: float, days: float | None, as_json: bool) -> None:
    """Make another key with the id KEY, and print it. Limits, budget and spend are unchanged."""
    from tokenbus_services.cli.keys import rotate

    lifetime_s = None if days is None else days * 86_400
    asyncio.run(rotate(key_id, grace_s=grace_hours * 3600, lifetime_s=lifetime_s, as_json=as_json))


@keys.command("revoke")
@click.argument("key_id", metavar="KEY")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def keys_revoke(key_id: str, as_json: bool) -> None:
    """Refuse the key with the id KEY from now on. Its open runs continue."""
    from tokenbus_services.cli.keys import revoke

    asyncio.run(revoke(key_id, as_json=as_json))


@click.command()
@click.argument("key_id", metavar="[KEY]", required=False)
@click.option("--days", type=click.IntRange(1, 366), default=30, show_default=True, help="Number of days to sum up.")
@json_lines
def spend(key_id: str | None, days: int, as_json: bool) -> None:
    """Show the spend of the key with the id KEY, or of each key. --json has exact amounts by day and price."""
    from tokenbus_services.cli.keys import show

    asyncio.run(show(key_id=key_id, days=days, as_json=as_json))
