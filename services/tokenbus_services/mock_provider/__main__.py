"""`python -m tokenbus_services.mock_provider`: runs the mock provider as a separate process.

Its URL is the first line on stdout. It exits on SIGINT and SIGTERM, and with ``--with-parent`` when stdin closes, which
happens when the parent process exits for any reason.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenbus_services.mock_provider.demo import answer, demo_scripts
from tokenbus_services.mock_provider.script import load_scripts
from tokenbus_services.mock_provider.server import MockProvider


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(prog="python -m tokenbus_services.mock_provider", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--scripts", type=Path, help="directory of scripts (default: the demo's)")
    parser.add_argument("--rate", type=float, help="reads per second, overriding each script's own; 0: no limit")
    parser.add_argument("--any-model", action="store_true", help="answer requests for any model, even without a script")
    parser.add_argument("--announce", metavar="NAME", help="print `ready NAME URL` as the first line, like a service")
    parser.add_argument("--with-parent", action="store_true", help="exit when stdin (a pipe) closes")
    options = parser.parse_args(arguments)
    try:
        scripts = load_scripts(options.scripts) if options.scripts else demo_scripts()
    except (OSError, ValueError) as e:
        parser.error(str(e))
    if options.rate is not None:
        scripts = [script.paced(options.rate or None) for script in scripts]
    choose = answer if options.any_model else None
    server = MockProvider(scripts, choose=choose, host=options.host, port=options.port)
    announced = f"ready {options.announce} " if options.announce else ""
    asyncio.run(_serve(server, announced, with_parent=options.with_parent))


async def _serve(server: MockProvider, announced: str, *, with_parent: bool) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if with_parent:
        loop.add_reader(sys.stdin, lambda: os.read(sys.stdin.fileno(), 4096) or stop.set())
    async with server:
        sys.stdout.write(f"{announced}{server.url}\n")
        sys.stdout.flush()
        await stop.wait()
    if with_parent:
        loop.remove_reader(sys.stdin)


if __name__ == "__main__":
    main()
