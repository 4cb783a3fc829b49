"""Which runs are recorded."""

from __future__ import annotations

from typing import Any

import pytest

from tokenbus.events.requests import Generate, Message
from tokenbus_services.intake.run_creation import is_recorded
from tokenbus_services.settings import RecordSettings


def request_with(**changes: Any) -> Generate:
    fields: dict[str, Any] = {"provider": "p", "model": "gpt-5-mini", "metadata": {"tenant": "ada"}, **changes}
    return Generate(messages=[Message(role="user", content="hi")], **fields)


@pytest.mark.parametrize(
    ("record", "settings", "recorded"),
    [
        (True, RecordSettings(), True),
        (True, RecordSettings(providers=("other",)), True),
        (False, RecordSettings(sample=1), False),
        (None, RecordSettings(), False),
        (None, RecordSettings(sample=1), True),
        (None, None, False),
        (True, None, False),
    ],
)
def test_the_requests_own_value_takes_precedence(
    record: bool | None, settings: RecordSettings | None, recorded: bool
) -> None:
    assert is_recorded("r", request_with(record=record), settings) is recorded


@pytest.mark.parametrize(
    ("only", "recorded"),
    [
        ({"providers": ("q", "p")}, True),
        ({"providers": ("q",)}, False),
        ({"models": ("gpt-5*",)}, True),
        ({"models": ("gpt-5",)}, False),
        ({"metadata": {"tenant": "ada"}}, True),
        ({"metadata": {"tenant": "ada", "more": "x"}}, False),
        ({"providers": ("p",), "models": ("claude*",)}, False),
    ],
)
def test_of_the_others_those_to_which_all_applies(only: dict[str, Any], recorded: bool) -> None:
    assert is_recorded("r", request_with(), RecordSettings(sample=1, **only)) is recorded


def test_a_sample_is_a_share_of_runs_and_for_a_run_always_the_same() -> None:
    runs = [f"run-{i}" for i in range(2000)]
    chosen = [run for run in runs if is_recorded(run, request_with(), RecordSettings(sample=0.1))]
    assert 140 < len(chosen) < 260
    assert chosen == [run for run in runs if is_recorded(run, request_with(), RecordSettings(sample=0.1))]
    more = {run for run in runs if is_recorded(run, request_with(), RecordSettings(sample=0.3))}
    assert set(chosen) < more
