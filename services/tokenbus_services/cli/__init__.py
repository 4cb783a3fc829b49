"""The `tokenbus` command: one module per command, and shared code. Contains no rules of the bus."""

from tokenbus_services.cli.entry import main

__all__ = ["main"]
