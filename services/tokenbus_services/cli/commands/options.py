"""Options that several commands have, and the question that some ask before they act."""

from __future__ import annotations

import sys

import click

json_events = click.option("--json", "as_json", is_flag=True, help="Print one JSON event per line, as on the bus.")
json_lines = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")


def agreed(question: str) -> bool:
    """The user's answer at the terminal. Raises UsageError if stdin is not a terminal."""
    if not sys.stdin.isatty():
        raise click.UsageError("Needs --yes, because there is no terminal to ask at.")
    return click.confirm(question, err=True)
