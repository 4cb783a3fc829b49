"""The table of clients in docs/guides/gateway.md is what these runs found. `KEEP=1` writes the rows that were run."""

from __future__ import annotations

import os
import traceback
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.more_clients.drivers import agents, cli, libraries, node_clients, official
from tests.more_clients.features import APIS, FEATURES, SETTINGS, Asked, Client, script
from tokenbus.testing import LocalBus

CLIENTS: list[type[Client]] = [
    *official.CLIENTS,
    *agents.CLIENTS,
    *libraries.CLIENTS,
    *node_clients.CLIENTS,
    *cli.CLIENTS,
]
INSTALLED = [client for client in CLIENTS if client.is_here()]
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "gateway.md"
WHOLE = bool(os.environ.get("KEEP") or os.environ.get("CLIENTS"))
"""`make test-clients` plays each client with all APIs, `make test` with one of them: of the clients one after another,
each with the next.
"""
BEGIN, END = "<!-- clients: python -m pytest tests/more_clients/test_table.py -->\n", "<!-- /clients -->\n"


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as local:
        script(local)
        yield local


def published() -> dict[str, str]:
    """The rows of the page, by client."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    return {row.split("|")[1].strip(): row for row in table.splitlines()[2:]}


def row_of(kind: type[Client], bus: LocalBus) -> tuple[str, list[str]]:
    client = kind(bus.gateway)
    played = APIS if WHOLE else (APIS[CLIENTS.index(kind) % len(APIS)],)
    features = [feature for feature, (_, has) in FEATURES.items() if has(kind)]

    def play(api: str) -> dict[str, str]:
        asked, failed = Asked(bus, api), {}
        for feature in features:
            try:
                FEATURES[feature][0](client, lambda model: f"{api}/{model}", asked)
            except BaseException as e:
                failed[feature] = f"--- {kind.name}, {feature}, {api}\n{''.join(traceback.format_exception(e))}"
        return failed

    with ThreadPoolExecutor(len(played)) as pool:
        failed = dict(zip(played, pool.map(play, played), strict=True))

    def cell(feature: str) -> str:
        if feature not in features:
            return ""
        apis = [api for api in played if feature in failed[api]]
        if feature in kind.fails:
            return f"no: {kind.fails[feature]}" if apis == [*played] else "yes, against its note"
        return f"not {', '.join(apis)}" if apis else "yes"

    row = f"| {' | '.join([kind.name, *map(cell, FEATURES)])} |"
    return row, [failure for of_api in failed.values() for failure in of_api.values()]


@pytest.mark.parametrize("kind", INSTALLED, ids=lambda kind: kind.name)
def test_a_client_does_what_its_row_says(kind: type[Client], bus: LocalBus) -> None:
    row, failures = row_of(kind, bus)
    print(row, *failures, sep="\n")
    if os.environ.get("KEEP"):
        keep(kind.name, row)
    assert row == published().get(kind.name)


def keep(name: str, row: str) -> None:
    rows = {**published(), name: row}
    order = [client.name for client in CLIENTS if client.name in rows]
    head = ["", *FEATURES]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(rows[name] for name in order)]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "".join(f"{line}\n" for line in lines) + END + rest.partition(END)[2])


def test_the_page_names_every_client_and_no_other() -> None:
    assert [*published()] == [client.name for client in CLIENTS]


def test_a_client_whose_package_is_not_here_is_named() -> None:
    missing: list[Any] = sorted({client.needs for client in CLIENTS} - {client.needs for client in INSTALLED})
    if missing:
        pytest.skip(f"make test-clients has {', '.join(missing)}")
