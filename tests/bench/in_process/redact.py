"""The cost of searching a provider's stream for secrets: reading and decoding with the search, beside decoding
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from tests.bench.in_process.decode import CHUNKS, ROUNDS, reads_of, seconds
from tokenbus.events.quirks import Quirks
from tokenbus.providers import registry
from tokenbus.providers.api import ApiName
from tokenbus_services.redaction.events import RedactedEvents
from tokenbus_services.redaction.redactor import Redaction

KEY = "sk-proj-" + "aB3_dE5-gH7jK9" * 8


def redacting(api: ApiName) -> tuple[float, float]:
    """Chunks a second, in reads as from a network: redacted and decoded, and only decoded."""
    reads = reads_of(api)

    def decode(clean: Callable[[bytes], bytes] | None) -> None:
        decoder = registry.get(api).decoder(status=200, headers={}, stream=True, quirks=Quirks())
        for read in reads:
            decoder.feed(clean(read) if clean else read)
        decoder.end()

    redaction = Redaction([KEY])
    times = [
        (seconds(lambda: decode(RedactedEvents(redaction).feed)), seconds(lambda: decode(None))) for _ in range(ROUNDS)
    ]
    return CHUNKS / median(t[0] for t in times), CHUNKS / median(t[1] for t in times)
