"""The judge: every guarantee of design.md over what a round left, by rules of its own. Pure; knows the JSON alone."""

from __future__ import annotations

from tests.chaos.judging import crowd, log, places, policies, remains, story, tools, topics
from tests.chaos.record import Record, Violation


def judge(record: Record) -> list[Violation]:
    """Every violation, sorted; none where all guarantees held."""
    found: list[Violation] = []
    for rules in (log, story, tools, topics, policies, remains, places, crowd):
        found += rules.judge(record)
    return sorted(set(found))
