"""The README's table of figures is what `make bench README=1` writes: its rows are those that the bench shows."""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import chain

from tests.bench import readme


def test_each_row_is_a_figure_that_the_bench_shows_and_none_is_missing() -> None:
    block = readme.PAGE.read_text().partition(readme.BEGIN)[2].partition(readme.END)[0]
    rows = [
        line.split("|")[1].strip() for line in block.strip().removeprefix(readme.HEAD).splitlines() if line[:1] == "|"
    ]
    patterns = [*chain.from_iterable(readme.SHOWN.values())]
    assert all(any(fnmatchcase(row, pattern) for pattern in patterns) for row in rows)
    assert all(any(fnmatchcase(row, pattern) for row in rows) for pattern in patterns)
