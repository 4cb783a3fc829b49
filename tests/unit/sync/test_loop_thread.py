"""The event loop of the synchronous client."""

from __future__ import annotations

import asyncio
import errno

import pytest

from tokenbus.sync.loop_thread import LoopThread


async def seven() -> int:
    return 7


def test_a_loop_that_cannot_be_made_is_an_error_and_may_be_tried_again() -> None:
    """A thread that died before its loop ran would be waited for for ever."""

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    loop = LoopThread()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "SelectorEventLoop", fail)
        with pytest.raises(OSError, match="Too many open files"):
            loop.start()
    assert not loop.was_started
    loop.start()
    assert loop.call(seven()) == 7
    loop.close()
