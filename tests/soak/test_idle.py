"""What a client of the idle test counts as silence."""

from __future__ import annotations

import pytest

from tests.soak.idle import PROTOCOLS, Client

CHUNK = b"%x\r\n%b\r\n"


@pytest.mark.parametrize("name", PROTOCOLS)
async def test_only_whole_keep_alives_of_the_protocol_count_as_silence(name: str) -> None:
    protocol = PROTOCOLS[name]
    client = Client("http://127.0.0.1:1", protocol)
    client.data_received(b'HTTP/1.1 200 OK\r\n\r\n5\r\ndata: "word"\r\n')
    assert client.started.done()
    client.quiet = True
    alive = CHUNK % (len(protocol.keep_alive), protocol.keep_alive)
    for at in range(len(alive)):
        client.data_received(alive[at : at + 1])
    client.data_received(alive * 2)
    assert (client.kept_alive, client.other) == (3, b"")
    assert client.is_answer
    client.data_received(CHUNK % (9, b"data: {}\n"))
    assert client.other
