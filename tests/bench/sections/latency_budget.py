"""CPU a chunk and latency by how long a chunk may be held back, beside the bare chain, in turn in one run."""

from __future__ import annotations

from functools import partial
from statistics import median

from tests.bench.figures import ROUNDS, WARM, Figure
from tests.bench.jobs import Load
from tests.bench.measure import Meter, Sample
from tests.bench.stack import PIPELINE, SERVICES, running

LOAD = Load(16, 300, 50)
BUDGETS_MS = (0, 10, 50)
"""Of voice, a chat and what nobody reads along."""


def budgeted() -> list[Figure]:
    """16 runs of 50 chunks/s under each `max_added_ms`, through one process and through three."""
    figures: list[Figure] = []
    for way, services in (("chained", (PIPELINE,)), ("separate", SERVICES)):
        samples: dict[int, list[Sample]] = {ms: [] for ms in BUDGETS_MS}
        bare: list[Sample] = []
        with running([WARM, LOAD], services=services) as stack:
            meter = Meter(stack)
            meter.services(WARM)
            meter.bare(WARM)
            for _ in range(ROUNDS):
                for ms, found in samples.items():
                    found.append(meter.services(LOAD, max_added_ms=ms))
                bare.append(meter.bare(LOAD))
        for ms, found in samples.items():
            what = f"max_added_ms {ms}, 16 runs of 50 chunks/s, {way}"
            for name, unit, of in (
                ("CPU a chunk", "µs", Sample.cpu_us),
                ("added latency p50", "ms", partial(Sample.latency_ms, share=0.5)),
            ):
                ratios = sorted(of(one) / of(beside) for one, beside in zip(found, bare, strict=True))
                figures.append(
                    Figure(
                        name=f"{name}, {what}",
                        unit=unit,
                        value=median(map(of, found)),
                        bare=median(map(of, bare)),
                        ratio=median(ratios),
                        spread=(ratios[0], ratios[-1]),
                    )
                )
            figures.append(
                Figure(name=f"commands sent a chunk, {what}", unit="", value=median(s.sent_per_chunk() for s in found))
            )
    return figures
