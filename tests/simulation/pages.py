"""The tables from the model in docs/operate/scale.md and docs/explain/measurements.md, between named comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.simulation.compare import about, near
from tests.simulation.measurement import Measured, Pair
from tests.simulation.scale import Larger, Loss, Plan

DOCS = Path(__file__).parents[2] / "docs"
SCALE, MEASUREMENTS = DOCS / "operate" / "scale.md", DOCS / "explain" / "measurements.md"


def write(measured: Measured, found: Larger) -> None:
    """Replace all sections."""
    for page, sections in {MEASUREMENTS: {"predictions": predictions(measured)}, SCALE: _of_larger(found)}.items():
        text = page.read_text(encoding="utf-8")
        for name, section in sections.items():
            text = _replaced(text, name, section)
        page.write_text(text, encoding="utf-8")


def section_of(name: str, page: Path) -> str:
    """The text between the comments."""
    found = _section(name).search(page.read_text(encoding="utf-8"))
    assert found, name
    return found[2].strip()


def _section(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- simulation: {name} -->\n)(.*?)(<!-- end of {name} -->)", re.DOTALL)


def _replaced(text: str, name: str, section: str) -> str:
    new, count = _section(name).subn(lambda found: f"{found[1]}\n{section}\n\n{found[3]}", text)
    if count != 1:
        raise ValueError(f"the page has {count} places for {name}")
    return new


def predictions(measured: Measured) -> str:
    """The predictions beside the measurement."""
    far = [pair for pair in measured.predicted if not near(pair)]
    verdict = (
        "All are within 20 %."
        if not far
        else f"{len(measured.predicted) - len(far)} of {len(measured.predicted)} are within 20 %."
        f" **Beyond it:** {'; '.join(f'{pair.name} ({pair.off:+.0%})' for pair in far)}."
    )
    busy = (
        " Other programs ran in at least one round. All figures are medians of the rounds." if _busy(measured) else ""
    )
    return "\n".join(
        [
            f"{about(measured).replace(':', ',', 1)}.{busy}",
            "",
            *_table(["predicted", "measured", "model", "off"], map(_row, measured.predicted)),
            "",
            verdict,
        ]
    )


QUIET = 0.1
"""Share of the machine that other programs may use."""


def _busy(measured: Measured) -> bool:
    return measured.foreign > QUIET


def _row(pair: Pair) -> list[str]:
    digits = 1 if pair.measured < 100 else 0
    return [
        pair.name,
        *(f"{value:,.{digits}f} {pair.unit}" for value in (pair.measured, pair.model)),
        f"{pair.off:+.0%}",
    ]


def _of_larger(found: Larger) -> dict[str, str]:
    plans = [found.small, found.cell, found.cluster, *(each.plan for each in found.grown)]
    bounds = [[_share(each.share) for each in found.bounds[rate]] for rate in found.bounds]
    names = [bound.what for bound in next(iter(found.bounds.values()))]
    return {
        "sizes": "\n".join([*_sizes(plans), "", *_cells(found)]),
        "losses": "\n".join(_losses(found)),
        "bounds": "\n".join(
            _table(
                ["share of the bound", *(f"{rate / 1e6:g} M chunks/s" for rate in found.bounds)],
                ([name, *(column[at] for column in bounds)] for at, name in enumerate(names)),
            )
        ),
    }


def _share(share: float) -> str:
    return f"{share:,.0f}" if share >= 10 else f"{share:.2g}"


def _sizes(plans: Sequence[Plan]) -> list[str]:
    head = [
        "event by event",
        *(plan.name if "chunks/s" in plan.name else f"a cell of {plan.rate:,.0f} chunks/s" for plan in plans),
    ]
    rows = [
        [
            "fetchers, normalizers, parsers",
            *(f"{p.shape.fetchers}, {p.shape.normalizers}, {p.shape.parsers}" for p in plans),
        ],
        ["servers, gateways", *(f"{p.shape.nodes}, {p.shape.subscribers}" for p in plans)],
        ["partitions", *(str(p.shape.partitions) for p in plans)],
        ["latency p50", *(f"{p.p50_ms:.1f} ms" for p in plans)],
        ["latency p99", *(f"{p.p99_ms:.1f} ms" for p in plans)],
        ["CPU a chunk", *(f"{p.cpu_us:.0f} µs" for p in plans)],
        ["first to saturate", *(f"{p.first} ({p.busiest[p.first]:.0%})" for p in plans)],
    ]
    return _table(head, rows)


def _cells(found: Larger) -> list[str]:
    s = found.cell.shape
    return _table(
        ["as cells (fluid)", *(f"{many.rate / 1e6:g} M chunks/s" for many in found.cells)],
        [
            ["cells", *(f"{many.count:,}" for many in found.cells)],
            [
                "fetchers, normalizers, parsers",
                *(
                    f"{many.count * s.fetchers:,}, {many.count * s.normalizers:,}, {many.count * s.parsers:,}"
                    for many in found.cells
                ),
            ],
            [
                "servers, gateways",
                *(f"{many.count * s.nodes:,}, {many.count * s.subscribers:,}" for many in found.cells),
            ],
        ],
    )


def _losses(found: Larger) -> list[str]:
    plans = list(found.losses)
    rows = [
        [found.losses[plans[0]][at].what, *(_loss(found.losses[name][at]) for name in plans)]
        for at in range(len(found.losses[plans[0]]))
    ]
    events = [
        [f"{loss.what}, one of two, event by event", _loss(loss), *(["not simulated"] * (len(plans) - 1))]
        for loss in found.killed
    ]
    return _table(["what ends", *plans], [*rows, *events])


def _loss(loss: Loss) -> str:
    then = f"worked off within {loss.then_s:.1f} s" if loss.then_s else "then a new attempt"
    return f"{loss.runs:,.0f} runs wait {loss.waits_s:.1f} s, {then}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]
