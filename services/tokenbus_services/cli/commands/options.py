"""Options that several commands have, and the question that some ask before they act."""

from __future__ import annotations

import sys

import click

json_events = click.option("--json", "as_json", is_flag=True, help="One JSON event a line, as on the bus.")
json_lines = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


def agreed(question: str) -> bool:
    """What the person at the terminal says. Raises UsageError if nobody is there to ask."""
    if not sys.stdin.isatty():
        raise click.UsageError("Needs --yes, for there is no terminal to ask at.")
    return click.confirm(question, err=True)
