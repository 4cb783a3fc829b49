"""One `tokenbus up` to a data directory, found by others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenbus.client.local_up import FILE_NAME, running_in
from tokenbus.errors import SettingsError
from tokenbus_services.cli.up.command import claim


def server_in(directory: Path) -> str | None:
    running = running_in(directory)
    return running.redis_url if running else None


def test_the_server_of_a_claimed_directory_is_found_until_the_claim_ends(tmp_path: Path):
    directory = tmp_path / "data"
    assert server_in(directory) is None
    with claim(directory) as claimed:
        assert server_in(directory) is None, "not there yet"
        claimed.announce("redis://127.0.0.1:1234567890")
        claimed.announce("redis://127.0.0.1:1")
        assert server_in(directory) == "redis://127.0.0.1:1"
    assert server_in(directory) is None


def test_a_second_claim_is_refused_with_the_holder(tmp_path: Path):
    with claim(tmp_path), pytest.raises(SettingsError, match=f"process {os.getpid()} runs"), claim(tmp_path):
        pass


def test_what_a_crash_left_behind_claims_nothing(tmp_path: Path):
    (tmp_path / FILE_NAME).write_text('{"pid":1,"redis_url":"redis://stale"}')
    assert server_in(tmp_path) is None
    with claim(tmp_path):
        pass


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="data_dir"), claim(tmp_path / "file" / "data"):
        pass
