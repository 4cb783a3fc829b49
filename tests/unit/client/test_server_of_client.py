"""Which server a client without a URL talks to: the environment's, else that of the `tokenbus up` that runs here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenbus.client.deployment import url_in
from tokenbus.client.local_up import DATA_DIRECTORY, FILE_NAME
from tokenbus.errors import SettingsError
from tokenbus_services.cli.up.command import claim

HERE, ELSEWHERE = "redis://127.0.0.1:1111", "redis://127.0.0.1:2222"


def test_the_environment_comes_before_the_tokenbus_up_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with claim(tmp_path / DATA_DIRECTORY) as claimed:
        claimed.announce(HERE)
        assert url_in({}) == HERE
        assert url_in({"TOKENBUS_REDIS_URL": ELSEWHERE}) == ELSEWHERE
    with claim(tmp_path / "other") as claimed:
        claimed.announce(ELSEWHERE)
        assert url_in({"TOKENBUS_DATA": str(tmp_path / "other")}) == ELSEWHERE


def test_a_tokenbus_up_that_ended_or_is_not_ready_is_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with claim(tmp_path / DATA_DIRECTORY) as claimed:
        with pytest.raises(SettingsError, match="no `tokenbus up` runs"):
            url_in({})
        claimed.announce(HERE)
    with pytest.raises(SettingsError, match=r"TOKENBUS_REDIS_URL: not set, .*no `tokenbus up` runs"):
        url_in({})
    (tmp_path / DATA_DIRECTORY / FILE_NAME).write_text(f'{{"pid": {os.getpid()}, "redis_url": "{HERE}"}}')
    with pytest.raises(SettingsError, match="no `tokenbus up` runs"):
        url_in({})


def test_the_file_of_another_user_names_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with claim(tmp_path / DATA_DIRECTORY) as claimed:
        claimed.announce(HERE)
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        with pytest.raises(SettingsError):
            url_in({})
