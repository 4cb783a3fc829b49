"""The model beside the measurements, as text."""

from __future__ import annotations

from tests.simulation.measurement import Measured, Pair

NEAR = 0.2
"""Maximum distance of the model from a measurement, as a share of the measurement."""


def near(pair: Pair) -> bool:
    """Whether the model is within that distance."""
    return abs(pair.off) <= NEAR


def about(measured: Measured) -> str:
    """Date and machine of the measurement, and the load of other programs."""
    before, after = measured.load
    return (
        f"{measured.date}: {measured.machine}; load average {before:.1f} before and {after:.1f} after;"
        f" other programs used up to {measured.foreign:.0%} of the machine"
    )


def report(measured: Measured) -> str:
    """Tables."""
    costs = measured.costs
    head = f"{'':<50}{'measured':>13}{'model':>12}{'off':>7}"
    return "\n".join(
        [
            about(measured),
            "",
            "micro-cases, from which the unit costs are",
            head,
            *map(_row, measured.given_again),
            "",
            "predicted: no cost was fitted to these",
            head,
            *map(_row, measured.predicted),
            "",
            f"unit costs in µs; hop {costs.hop_us:.0f} µs, cold after {costs.cold_s * 1e3:g} ms, sent at"
            f" {costs.sent_at:.0%} of a turn, jitter {costs.jitter:.2f}",
            f"{'':<14}{'turn':>8}{'cold':>8}{'item':>8}{'chunk':>8}{'run':>8}",
            *(
                f"{kind:<14}{cost.turn_us:>8.1f}{cost.cold_us:>8.1f}{cost.item_us:>8.1f}{cost.chunk_us:>8.2f}"
                f"{cost.run_us:>8.0f}"
                for kind, cost in sorted(costs.processes.items())
            ),
        ]
    )


def _row(pair: Pair) -> str:
    far = "" if near(pair) else "  beyond 20 %"
    return f"{pair.name:<50}{pair.measured:>10,.1f} {pair.unit}{pair.model:>12,.1f}{pair.off:>+7.0%}{far}"
