"""The command `tokenbus`: one command of `commands`, and the exit code of its end."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

import click

from tokenbus import __version__
from tokenbus.errors import ServerUnavailable
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.commands import keys, operate, runs, waits
from tokenbus_services.cli.commands import operate as start
from tokenbus_services.cli.commands import runs as dead
from tokenbus_services.cli.commands import runs as records


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command, and end the process with its exit code (see `ending`)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale that cannot write a character must not end a command
    try:
        status = tokenbus.main(arguments, prog_name="tokenbus", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as e:
        e.show()  # the help itself, to stderr: it is no error's one line
        status = e.exit_code
    except click.ClickException as e:
        context = e.ctx if isinstance(e, click.UsageError) else None
        problem = " ".join(e.format_message().split())  # click puts each choice on a line of its own
        ending.print_error(problem + (f" (see: {context.command_path} --help)" if context else ""))
        status = e.exit_code
    except (KeyboardInterrupt, click.Abort):
        status = ending.INTERRUPTED
    except BrokenPipeError:
        status = ending.abandon_stdout()
    except ServerUnavailable as e:
        from tokenbus_services.cli.connect import advice_on  # only a command that failed needs it

        status = ending.report(e, advice_on(e))
    except Exception as e:
        status = ending.report(e)
    sys.exit(status)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.option("-v", "--verbose", is_flag=True, help="Log everything, and show where an error came from.")
@click.pass_context
def tokenbus(context: click.Context, verbose: bool) -> None:
    """A message bus for language-model output.

    Settings come from the file in TOKENBUS_CONFIG (default: tokenbus.toml in the working directory) and from the
    environment (TOKENBUS_REDIS_URL, …).
    """
    from tokenbus_services.settings.file import use_file_here

    if context.invoked_subcommand != "worker":  # which has more to import, and then calls `collect_less_often`
        gc.enable()
    if verbose:
        os.environ["TOKENBUS_LOG_LEVEL"] = "debug"  # for the services that this command starts, too
    context.obj = use_file_here(os.environ)


for _command in (
    start.worker,
    start.up,
    start.demo,
    runs.send,
    runs.chat,
    runs.tail,
    runs.runs,
    runs.follow,
    runs.cancel,
    waits.waiting,
    waits.approve,
    waits.deny,
    waits.answer,
    operate.top,
    operate.repartition,
    operate.slots,
    operate.scripts,
    operate.doctor,
    operate.check,
    operate.erase,
    operate.audit,
    dead.dead,
    records.records,
    records.replay,
    keys.keys,
    keys.spend,
):
    tokenbus.add_command(_command)
