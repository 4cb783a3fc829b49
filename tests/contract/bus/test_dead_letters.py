"""The dead stream has each poison entry once."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as ConnectionLost

from tokenbus.bus.dead_letters import DeadLetter, all_dead_letters, dead_letter
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server


@pytest.mark.parametrize("rejected", [False, True])
async def test_a_dead_letter_whose_reply_was_lost_is_not_added_again(
    server: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch, rejected: bool
) -> None:
    command, lost = server.client.execute_command, 0

    async def loses_replies(name: str, *args: Any, **options: Any) -> Any:
        nonlocal lost
        reply = await command(name, *args, **options)
        if name.startswith("EVAL") and lost < 2:
            lost += 1
            raise ConnectionLost("the reply is lost")
        return reply

    monkeypatch.setattr(server.client, "execute_command", loses_replies)
    letter = DeadLetter(reason="no such thing", stage="intake", stream=keys.requests, entry="1-0", bytes=b"x")
    await dead_letter(server, keys, letter, rejected=rejected)
    assert lost == 2
    await dead_letter(server, keys, letter, rejected=rejected)  # another one: given back, it may fail as before
    assert [stored.entry for stored in [dead async for dead in all_dead_letters(server, keys)]] == [letter, letter]
    assert await server.client.llen(keys.rejected) == 2 * rejected
