"""Programs of `test_local_bus`: a bus in a process that starves it, or whose service ends. Bounds are shorter here."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time

import pytest

from tokenbus.errors import TokenbusError
from tokenbus.testing import LocalBus
from tokenbus_services.runtime import supervision
from tokenbus_services.runtime.supervision import WorkerStuck

STUCK_S = 1.0
supervision.STUCK_S = STUCK_S  # pyright: ignore[reportConstantRedefinition]
supervision.HAND_OVER_S = 0.5  # pyright: ignore[reportConstantRedefinition]


def hold_interpreter(seconds: float) -> None:
    """Hold the interpreter's lock, as a library's long call in C does."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def starved() -> None:
    """Held in one long piece, after a second bus came and left; then in pieces, between which each loop turns once."""
    with LocalBus() as local, local.sync_client() as bus:
        local.model_says("greeter", "Hello.")
        with LocalBus():
            pass
        hold_interpreter(4 * STUCK_S)
        assert bus.publish(local.request("greeter")).result().text == "Hello."
        give_up = time.monotonic() + 6 * STUCK_S
        while time.monotonic() < give_up:
            hold_interpreter(0.8)
            time.sleep(0.002)
        time.sleep(2 * supervision.HAND_OVER_S)  # a bus that ends its process does so within this
        assert bus.publish(local.request("greeter")).result().text == "Hello."


def service_ends() -> None:
    """A task that a service cannot do without ends."""
    local = LocalBus()
    local.start()
    local.model_says("greeter", "Hello.")
    loop = local._loop  # pyright: ignore[reportPrivateUsage]
    assert loop
    with local.sync_client() as bus:
        assert bus.publish(local.request("greeter")).result().text == "Hello."
        loop.call_soon_threadsafe(_end_leases, loop)
        began = time.monotonic()
        while local._loop:  # pyright: ignore[reportPrivateUsage]
            assert time.monotonic() - began < 30, "the bus did not stop"
            time.sleep(0.01)
        time.sleep(2 * supervision.HAND_OVER_S)
        with pytest.raises(TokenbusError) as refused:
            bus.publish(local.request("greeter")).result()
        assert refused.value.retryable
    with pytest.raises(WorkerStuck, match=r"lease.*was cancelled"):
        local.stop()


def _end_leases(loop: asyncio.AbstractEventLoop) -> None:
    tasks = [task for task in asyncio.all_tasks(loop) if "lease" in task.get_name()]
    assert tasks, sorted(task.get_name() for task in asyncio.all_tasks(loop))
    tasks[0].cancel()


{"starved": starved, "service_ends": service_ends}[sys.argv[1]]()
print("lives")
