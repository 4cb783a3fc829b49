"""SIGTERM and Ctrl-C: the first signal requests an orderly stop, the second ends the process at once."""

from __future__ import annotations

import asyncio
import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_on_signal() -> asyncio.Event:
    """Return an event that the first signal sets. Call inside the event loop, in the main thread."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    # Under nohup, closing the terminal must not stop anything.
    heeded = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]

    def first() -> None:
        for number in heeded:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        stop.set()

    for number in heeded:
        loop.add_signal_handler(number, first)
    return stop
