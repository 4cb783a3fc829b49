"""The command line, from its own help."""

from __future__ import annotations

from collections.abc import Iterator

import click

from tokenbus_services.cli import exit_codes
from tokenbus_services.cli.main import tokenbus
from tokenbus_services.runtime.supervision import EXIT_STUCK

WIDTH = 100
COMPLETION = """\
## Completion

Your shell can complete commands, options, topics, configured providers and the newest runs. Add the line for your
shell to its start-up file:

=== "bash"

    ```sh
    eval "$(_TOKENBUS_COMPLETE=bash_source tokenbus)"    # ~/.bashrc; bash 4.4 or newer
    ```

=== "zsh"

    ```sh
    eval "$(_TOKENBUS_COMPLETE=zsh_source tokenbus)"     # ~/.zshrc
    ```

=== "fish"

    ```sh
    _TOKENBUS_COMPLETE=fish_source tokenbus | source     # ~/.config/fish/completions/tokenbus.fish
    ```

Runs are completed for `follow`, `cancel` and `tail --run` if the server answers within a second.
"""


def page() -> str:
    """Every command with its arguments and options."""
    lines = [
        "# Commands",
        "",
        "Run the bus, send requests, watch runs and repair what failed, from a terminal.",
        "Each command shows the same with `--help`.",
        "",
        "```sh",
        "tokenbus demo",
        "```",
        "",
        "| exit code | meaning |",
        "|---|---|",
        *[f"| {code} | {meaning} |" for code, meaning in _exit_codes()],
        "",
    ]
    for context in _all(click.Context(tokenbus, info_name="tokenbus", **tokenbus.context_settings)):
        path = context.command_path
        lines += [f"## {path}" if context.parent else "## Options of every command", ""]
        lines += ["```text", context.get_help(), "```", ""]
    return "\n".join(lines) + "\n" + COMPLETION


def _exit_codes() -> list[tuple[int, str]]:
    return [
        (0, "success"),
        (exit_codes.OTHER, "any other error"),
        (exit_codes.USAGE, "a setting, an option or the request is invalid"),
        (exit_codes.SERVER, "the server cannot be reached or returned an error"),
        (exit_codes.RUN_STATUS["incomplete"], "the run ended `incomplete`"),
        (exit_codes.RUN_STATUS["failed"], "the run ended `failed`"),
        (exit_codes.RUN_STATUS["cancelled"], "the run ended `cancelled`"),
        (EXIT_STUCK, "a worker could not continue; start it again"),
        (exit_codes.INTERRUPTED, "Ctrl-C"),
    ]


def _all(context: click.Context) -> Iterator[click.Context]:
    """The command and those below it."""
    context.terminal_width = context.max_content_width = WIDTH
    yield context
    if isinstance(context.command, click.Group):
        for name, command in sorted(context.command.commands.items()):
            yield from _all(click.Context(command, parent=context, info_name=name))
