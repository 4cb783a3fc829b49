"""SIGTERM and Ctrl-C: the first signal requests an orderly stop, the last ends the process at once."""

from __future__ import annotations

import asyncio
import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_on_signal(*hurry: asyncio.Event) -> asyncio.Event:
    """Return an event that the first signal sets; the next ones set those of ``hurry``, and the one after them ends the
    process. Call inside the event loop, in the main thread.
    """
    stop = asyncio.Event()
    left = [stop, *hurry]
    loop = asyncio.get_running_loop()

    # Under nohup, closing the terminal must not stop anything.
    heeded = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]

    def heed() -> None:
        left.pop(0).set()
        for number in () if left else heeded:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in heeded:
        loop.add_signal_handler(number, heed)
    return stop
