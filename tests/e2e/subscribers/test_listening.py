"""Those who listen, through the running services: sentences of a group, and a run that broke off taken up again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.fleet import PIPELINE, fleet, provider_table
from tests.e2e.providers.test_continue import GOES_ON
from tokenbus import Client, Response, Sentence, coalesced
from tokenbus.bus.keys import Keys
from tokenbus.errors import RunIncomplete, RunNotRepeatable
from tokenbus_services.mock_provider import CutOff, Delivery, Fixed, MockProvider, Reply, Script, Turn

REPLY = "Dr. Grey came at 3.30 p.m. and left. Did anybody see her? Nobody did"
CUTS = Delivery(cuts=Fixed(size=19))
BROKEN = Script(
    name="broken",
    turns=(
        Turn(says=Reply(text=REPLY), first=(CutOff(after_text="see"),), delivery=CUTS),
        Turn(says=Reply(text=" her? Nobody did"), delivery=CUTS),
    ),
)
REQUEST = {
    "provider": "claude",
    "model": "broken",
    "messages": [{"role": "user", "content": "Go on."}],
    "on_failure": "fail",
}


def vendors(url: str) -> str:
    """One whose models continue from a partial answer, and one of another name that speaks an API which takes none. The
    model of `anthropic` is none that continues."""
    goes_on = provider_table("claude", "anthropic", url, GOES_ON)
    return goes_on + provider_table("far", "openai-responses", url)


async def test_an_interrupted_run_is_continued_or_retried_and_read_in_sentences(
    server_url: str, keys: Keys, tmp_path: Path
) -> None:
    async with (
        MockProvider([BROKEN]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, PIPELINE, vendors(provider.url)),
        Client(server_url, prefix=keys.prefix, partitions=keys.partitions) as bus,
        bus.sentences(group="speech", from_="start") as speech,
    ):
        run = await bus.publish(REQUEST)
        with pytest.raises(RunIncomplete) as caught:
            await run.result()
        assert caught.value.result
        received = caught.value.result.text
        assert received.startswith("Dr. Grey")
        rest = await (await bus.resume(run)).result()
        for name in ("anthropic", "far"):
            messages = [
                {"role": "user", "content": f"Go on, {name}."}
            ]  # its own words: a script breaks off once for each
            stuck = await bus.publish({**REQUEST, "provider": name, "messages": messages})
            with pytest.raises(RunIncomplete):
                await stuck.result()
            with pytest.raises(RunNotRepeatable, match=f"broken at {name} cannot continue"):
                await bus.resume(stuck)
        again = await bus.retry(run)
        whole = Response.of([event async for event in coalesced(again.events())])
        assert received.rstrip() + rest.text == whole.text == REPLY
        assert rest.run != whole.run

        spoken: dict[str, list[Sentence]] = {}
        async with asyncio.timeout(60):
            while "".join(s.text for s in spoken.get(whole.run, [])) != REPLY:
                sentence = await anext(speech)
                spoken.setdefault(sentence.run, []).append(sentence)
    assert [s.text for s in spoken[whole.run]] == [
        "Dr. Grey came at 3.30 p.m. and left. ",
        "Did anybody see her? ",
        "Nobody did",
    ]
    seqs = [seq for s in spoken[whole.run] for seq in (s.first, s.last)]
    assert seqs == sorted(seqs)
