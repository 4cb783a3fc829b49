"""How often Python's collector looks for cycles."""

from __future__ import annotations

import gc

YOUNG = 10_000
"""New objects before the youngest generation is looked at. Python's default of 700 (2,000 from 3.13 on) is reached
several times in one batch, and what a batch makes is freed by its reference counts."""
MIDDLE, OLD = 10, 10
"""Python's defaults: old objects are looked at once in a hundred looks at the youngest."""


def collect_less_often() -> None:
    """Keep all that a service imported and built out of every later collection, and look at the rest less often.

    A worker under full load spends 5 % of its time in the collector otherwise. Call it once, before the service runs.
    The collector is on after that; the command's entry has turned it off for the imports.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
