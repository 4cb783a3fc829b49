"""The judge: checks every guarantee of design.md on the record of a round, by rules of its own. Pure; it reads the JSON
alone.
"""

from __future__ import annotations

from tests.chaos.judging import crowd, log, places, policies, pressure, remains, story, talks, tools, topics, trees
from tests.chaos.record import Record, Violation


def judge(record: Record) -> list[Violation]:
    """All violations, sorted; none if all guarantees held."""
    found: list[Violation] = []
    for rules in (log, story, tools, topics, policies, remains, places, crowd, talks, trees, pressure):
        found += rules.judge(record)
    return sorted(set(found))
