"""Durable Streams over run logs: offsets, cursors, headers and bodies."""

from __future__ import annotations

import msgspec
import pytest

from tests.services.gateway.logs import DONE, log_of, text
from tokenbus.events.public import UnknownEvent, decode
from tokenbus_services.gateway.problem import Refusal
from tokenbus_services.gateway.surfaces.durable_streams import protocol
from tokenbus_services.gateway.surfaces.durable_streams.protocol import (
    Ask,
    Producer,
    judged,
    log_page,
    position,
    producer_in,
)

LOG = log_of([*text(0, "Hi"), DONE])
WHOLE = log_page(0, LOG, tail=len(LOG), closed=True)
FIRST = log_page(0, LOG[:2], tail=len(LOG), closed=True)
EMPTY = log_page(2, [], tail=2, closed=False)


@pytest.mark.parametrize(
    ("query", "position"),
    [
        ([], Ask("-1", None, None)),
        ([("offset", "-1"), ("other", "x")], Ask("-1", None, None)),
        ([("offset", "now"), ("live", "sse")], Ask("now", "sse", None)),
        (
            [("offset", "0000000000000012"), ("live", "long-poll"), ("cursor", "7")],
            Ask("0000000000000012", "long-poll", 7),
        ),
    ],
)
def test_a_reader_says_where_it_begins_and_how_it_reads(query: list[tuple[str, str]], position: Ask) -> None:
    assert protocol.asked(query) == position


@pytest.mark.parametrize(
    "query",
    [
        [("offset", "")],
        [("offset", "0,1")],
        [("offset", "0 1")],
        [("offset", "1"), ("offset", "2")],
        [("live", "sse")],
        [("offset", "-1"), ("live", "telepathy")],
    ],
)
def test_what_is_no_place_in_a_stream_is_refused(query: list[tuple[str, str]]) -> None:
    with pytest.raises(Refusal) as caught:
        position(protocol.asked(query).offset)
    assert caught.value.problem.status == 400


def test_only_the_last_page_of_a_run_that_is_over_closes_the_stream() -> None:
    assert protocol.headers_of(WHOLE)["stream-closed"] == "true"
    headers = protocol.headers_of(FIRST)
    assert headers["stream-next-offset"] == "0000000000000002"
    assert not {"stream-closed", "stream-up-to-date"} & headers.keys()
    assert protocol.etag_of("r1", WHOLE) != protocol.etag_of("r1", FIRST)


def test_a_cursor_is_always_above_the_readers_own() -> None:
    now = protocol.CURSOR_EPOCH_S + 100.0
    assert protocol.cursor_of(now, None) == 5
    assert protocol.cursor_of(now, 5) == 6
    assert protocol.cursor_of(now, 9) == 10
    assert protocol.cursor_of(now, 3) == 5


def test_every_data_event_is_followed_by_a_control_event() -> None:
    assert protocol.sse_of(EMPTY, 4) == (
        b'event: control\ndata:{"streamNextOffset":"0000000000000002","streamCursor":"4","upToDate":true}\n\n'
    )
    data, control, rest = protocol.sse_of(WHOLE, 4).split(b"\n\n")
    assert rest == b""
    events = msgspec.json.decode(data.removeprefix(b"event: data\ndata:"), type=list[msgspec.Raw])
    assert [decode(event) for event in events] == LOG
    assert msgspec.json.decode(control.removeprefix(b"event: control\ndata:")) == {
        "streamNextOffset": f"{len(LOG):016d}",
        "upToDate": True,
        "streamClosed": True,
    }


def test_an_event_of_a_newer_version_is_sent_as_it_was_written() -> None:
    fields: dict[str, object] = {"type": "new", "run": "r1", "seq": 0, "turn": 0, "attempt": 1, "more": [1]}
    event = UnknownEvent(run="r1", seq=0, turn=0, attempt=1, event_type="new", fields=fields)
    assert msgspec.json.decode(protocol.body_of(log_page(0, [event], tail=1, closed=False))) == [fields]
    assert msgspec.json.decode(protocol.session_item(event)) == fields


def test_a_producer_is_named_by_three_headers_or_none() -> None:
    given = {"producer-id": "p", "producer-epoch": "2", "producer-seq": "7"}
    assert producer_in(given) == Producer("p", 2, 7)
    assert producer_in({}) is None
    for wrong in ({"producer-id": ""}, {"producer-epoch": "1e3"}, {"producer-seq": "-1"}, {"producer-id": "x" * 257}):
        with pytest.raises(Refusal):
            producer_in({**given, **wrong})
    with pytest.raises(Refusal):
        producer_in({"producer-id": "p"})


@pytest.mark.parametrize(
    ("asked", "accepted", "verdict"),
    [
        ((0, 0), (0, -1), "new"),
        ((3, 0), (0, -1), "new"),
        ((0, 4), (0, 3), "new"),
        ((0, 2), (0, 3), "known"),
        ((1, 0), (0, 3), "new"),
        ((0, 5), (0, 3), "sequence_gap"),
        ((0, 4), (1, 0), "stale_epoch"),
        ((2, 1), (1, 0), "invalid_value"),
    ],
)
def test_an_append_of_a_producer_is_its_next_one_or_known_or_refused(
    asked: tuple[int, int], accepted: tuple[int, int], verdict: str
) -> None:
    try:
        found: str = judged(Producer("p", *asked), *accepted)
    except Refusal as e:
        found = e.problem.code
    assert found == verdict
