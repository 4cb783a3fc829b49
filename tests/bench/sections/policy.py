"""The time that the policy stage adds to a chunk, with a policy that passes everything."""

from __future__ import annotations

from statistics import median

from tests.bench.figures import ROUNDS, WARM, Figure
from tests.bench.jobs import Load
from tests.bench.measure import Meter, Sample
from tests.bench.stack import SERVICES, running

LOAD = Load(2, 250, 50)
PASSES = '[policies.passes]\nuse = "tokenbus.policy:StreamProcessor"\n'


IN_WORKER = "policy_executors = 0\n"
"""The policy runs in the worker itself. The first line of the further settings belongs to `[limits]`."""
BUSY = Load(16, 250, 50)


def judged() -> list[Figure]:
    """The same loads without the stage, with it, and with policies in the worker instead of in executors."""
    bare, executors = _rounds("")
    _, in_worker = _rounds(IN_WORKER)
    cost = [_cost(sample) - _cost(without) for sample, without in zip(executors[BUSY], bare[BUSY], strict=True)]
    cheap = median(_cost(sample) - _cost(without) for sample, without in zip(in_worker[BUSY], bare[BUSY], strict=True))
    return [
        *(
            Figure(
                name=f"added latency of an idle policy stage, {name} at 100 chunks/s",
                unit="ms",
                value=median(
                    sample.latency_ms(share) - without.latency_ms(share)
                    for sample, without in zip(executors[LOAD], bare[LOAD], strict=True)
                ),
            )
            for name, share in (("p50", 0.5), ("p99", 0.99))
        ),
        Figure(
            name="CPU a chunk of an idle policy stage, 16 runs of 50 chunks/s; bare: policies in the worker",
            unit="µs",
            value=median(cost),
            bare=cheap,
            ratio=median(cost) / cheap,
        ),
    ]


def _rounds(settings: str) -> tuple[dict[Load, list[Sample]], dict[Load, list[Sample]]]:
    """The samples of each load without policies and with one, in turn."""
    without: dict[Load, list[Sample]] = {LOAD: [], BUSY: []}
    judged: dict[Load, list[Sample]] = {LOAD: [], BUSY: []}
    with running([WARM, LOAD, BUSY], settings=settings + PASSES, services=(*SERVICES, "policy")) as stack:
        meter = Meter(stack)
        meter.services(WARM, policies=["passes"])
        for _ in range(ROUNDS):
            for load in (LOAD, BUSY):
                judged[load].append(meter.services(load, policies=["passes"]))
                without[load].append(meter.services(load))
    return without, judged


def _cost(sample: Sample) -> float:
    return sample.cpu_us() + sample.cpu_us_of("policy")
