"""Commands about what runs wait for: list it, and decide it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import click

from tokenbus_services.cli.runs.completion import run_ids

C = TypeVar("C", bound=Callable[..., Any])

_OPTIONS = (
    click.argument("run", shell_complete=run_ids),
    click.argument("wait", required=False),
    click.option("--by", help="Who decides, for the log. Default: the user of this system."),
)


def decision(command: C) -> C:
    """What each command that decides takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("run", required=False, shell_complete=run_ids)
@click.option("--tenant", help="Only what runs of this tenant wait for.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Maximum to show.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def waiting(run: str | None, tenant: str | None, limit: int, as_json: bool) -> None:
    """List what runs wait for, or RUN alone: decisions on tool calls, answers, results of clients' tools. What waits
    longest comes first.
    """
    from tokenbus_services.cli.runs.waits import listing

    asyncio.run(listing(run, tenant=tenant, limit=limit, as_json=as_json))


@click.command()
@decision
@click.option("--arguments", metavar="JSON", help="Run the call with these arguments instead.")
def approve(run: str, wait: str | None, by: str | None, arguments: str | None) -> None:
    """Let a tool call of RUN run. WAIT may be left out if RUN waits for one decision alone.

    Exit code: 1 if it was decided before, or RUN does not wait for it.
    """
    from tokenbus_services.cli.runs.waits import decide

    asyncio.run(decide(run, wait, "allow", by=by, given=arguments))


@click.command()
@decision
@click.option("--reason", help="What the model reads.")
def deny(run: str, wait: str | None, by: str | None, reason: str | None) -> None:
    """Deny a tool call of RUN. WAIT may be left out if RUN waits for one decision alone.

    Exit code: 1 if it was decided before, or RUN does not wait for it.
    """
    from tokenbus_services.cli.runs.waits import decide

    asyncio.run(decide(run, wait, "deny", by=by, given=reason))


@click.command()
@decision
@click.option("--content", metavar="JSON", help="The answer, as the question's schema says.")
@click.option("--decline", is_flag=True, help="Give no answer.")
def answer(run: str, wait: str | None, by: str | None, content: str | None, decline: bool) -> None:
    """Answer a question of a tool of RUN. WAIT may be left out if RUN waits for one answer alone.

    Exit code: 1 if it was decided before, or RUN does not wait for it.
    """
    from tokenbus_services.cli.runs.waits import decide

    if decline and content is not None:
        raise click.UsageError("Give --content or --decline.", click.get_current_context())
    asyncio.run(decide(run, wait, "decline" if decline else "accept", by=by, given=content))
