"""Speaks the text of models, sentence by sentence. Start as many as you like: they share the runs.

python speech_worker.py    # beside `tokenbus up --mock`, or with TOKENBUS_REDIS_URL=redis://…
"""

import asyncio

from tokenbus import Client, Sentence


async def speak(sentence: Sentence) -> None:
    """Put your text-to-speech here."""
    print(f"{sentence.run}: {sentence.text.strip()}", flush=True)


async def main() -> None:
    async with Client() as bus, bus.sentences(group="speech", from_="start") as sentences:
        async for sentence in sentences:
            await speak(sentence)  # the next iteration acknowledges the sentence


if __name__ == "__main__":
    asyncio.run(main())
