"""A read changes and takes nothing, so any web page may send it to a gateway without keys; what takes is no read.

The routes are those of the routing tables.
"""

from __future__ import annotations

import re
from collections.abc import Generator

import httpx
import pytest
import redis

from tests.e2e.gateway.served import gateway_routes
from tests.waiting import eventually_sync
from tokenbus.bus.keys import TOPICS
from tokenbus.testing import LocalBus, Reply

FOREIGN = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
KEPT = re.compile(
    r"tokenbus:(\{\d+\}:(session|run|log|index|decision|visible|chunks|blocks|runs|sessions)\b.*|dead|audit.*|requests)"
)
"""What belongs to users. The rest moves by itself: leases, members, counts of activity."""
SAYS = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus("[console]\n[gateway]\nkeep_alive_s = 0.2\n") as running:
        running.model_says("text", *[Reply(text="one two three")] * 9)
        yield running


@pytest.fixture(scope="module")
def run(bus: LocalBus) -> str:
    """A run that has ended, beside a session and a group that has read nothing yet."""
    with httpx.Client(base_url=bus.gateway, timeout=60) as http:
        request = {"model": "anthropic/text", "max_tokens": 9}
        for item in ({"type": "configure", "request": request}, {"type": "message", "content": "hello"}):
            assert http.post("/sessions/talk/events", json={"item": item}).status_code == 200
        eventually_sync(lambda: not http.get("/sessions/talk").json().get("run"))
        run = http.post("/runs", json={**request, "messages": SAYS}).json()["run"]
        assert http.get(f"/runs/{run}?wait=true").json()["status"] == "completed"
    return run


def kept(bus: LocalBus) -> dict[str, bytes | None]:
    with redis.Redis.from_url(bus.url) as client:
        names = [name for name in client.scan_iter("*", count=1000) if KEPT.fullmatch(name.decode())]
        return {name.decode(): client.dump(name) for name in sorted(names)}


@pytest.mark.parametrize("path", sorted(path for method, path in gateway_routes(console=True) if method == "GET"))
def test_a_read_of_another_sites_page_changes_nothing(bus: LocalBus, run: str, path: str) -> None:
    path = re.sub(r"\{session[^}]*\}", "talk", path)
    path = re.sub(r"\{topic[^}]*\}", "visible", path)
    path = re.sub(r"\{[^}]*\}", run, path)
    before = kept(bus)
    assert any(":session:" in name for name in before)
    with httpx.Client(base_url=bus.gateway, timeout=60) as http, http.stream("GET", path, headers=FOREIGN) as answer:
        next(answer.iter_raw(), b"")
        assert answer.status_code < 500
    assert kept(bus) == before


def test_what_takes_events_from_a_group_is_no_read(bus: LocalBus, run: str) -> None:
    with httpx.Client(base_url=bus.gateway, timeout=60) as http:
        for topic in TOPICS:
            path = f"/topics/{topic}?group=mine&from=start"
            assert http.get(path, headers=FOREIGN).status_code == 403
            with http.stream("GET", path) as answer:
                assert answer.status_code == 200
