"""The picture of the shape, first thing in two pages, has every service, topic and client by the names in the code."""

from __future__ import annotations

import re
import tomllib
from typing import get_args

import pytest

from tests.unit.docs.pages import ROOT, rows, sections
from tokenbus import Client
from tokenbus.bus.keys import TOPICS, InternalTopic
from tokenbus_services.cli.service_registry import SERVICES

PAGES = {name: (ROOT / name).read_text() for name in ("CONTRIBUTING.md", "docs/explain/design.md")}
SHAPE = "The shape at a glance"
_CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def rooms(package: str) -> set[str]:
    """The rooms that the import contract places in this package: all of them, as it is exhaustive."""
    [contract] = [each for each in _CONTRACTS if each.get("containers") == [package] and each.get("exhaustive")]
    return {name for layer in contract["layers"] for name in layer.split(" | ")}


def picture(page: str) -> str:
    [drawn] = re.findall(r"```\n(.*?)```", sections(page)[SHAPE], re.DOTALL)
    return drawn


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_the_picture_is_the_first_thing_of_the_page(page: str) -> None:
    assert next(iter(sections(page))) == SHAPE
    assert picture(page) == picture(PAGES["CONTRIBUTING.md"])


def test_each_box_is_a_room_of_the_services_and_each_service_is_drawn() -> None:
    drawn = picture(PAGES["CONTRIBUTING.md"])
    lines = drawn.splitlines()
    tops = [(n, top) for n, line in enumerate(lines) for top in re.finditer(r"┌[^┌┐]*┐", line)]
    boxes = {lines[n + 1][top.start() + 1 : top.end() - 1].strip() for n, top in tops}
    services = {"policy_stage" if service == "policy" else service for service in SERVICES}
    below = {"blobs", "pipeline"}  # they have no place in the flow
    assert boxes == services - below | {"intake", "cli", "console"}
    assert boxes <= rooms("tokenbus_services")
    assert below <= set(re.findall(r"(\w+):", drawn))


def test_each_topic_and_each_client_is_drawn() -> None:
    words = set(re.findall(r"[\w./]+", picture(PAGES["CONTRIBUTING.md"])))
    assert {"requests", "dead", *get_args(InternalTopic), *TOPICS} <= words
    assert f"tokenbus.{Client.__name__}" in words
    assert {f"clients/{path.name}" for path in (ROOT / "clients").iterdir() if path.is_dir()} <= words


def test_each_room_of_the_code_has_its_line() -> None:
    named = {
        package: {cell.strip("`") for first, _ in rows(text) for cell in first.split(", ")}
        for package, text in zip(
            ("tokenbus", "tokenbus_services"),
            sections(PAGES["CONTRIBUTING.md"])["Where things are"].split("\n\n`tokenbus_services`"),
            strict=True,
        )
    }
    assert named["tokenbus"] == rooms("tokenbus")
    assert named["tokenbus_services"] == rooms("tokenbus_services")
