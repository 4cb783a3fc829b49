"""The `tokenbus` command: one module a command, and what they share. No rule of the bus is here."""

from tokenbus_services.cli.entry import main

__all__ = ["main"]
