"""The server's password may come apart from its address, from the environment or a file, and is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenbus.bus.server.url import parse_url, with_password
from tokenbus.client.deployment import url_in
from tokenbus.errors import SettingsError
from tokenbus_services.settings import load

SECRET = "p@ss/w:rd#é %"


@pytest.mark.parametrize(
    "url",
    [
        "redis://ada@host:1/2",
        "rediss://ada@host?ssl_ca_certs=/ca.pem",
        "redis+sentinel://ada@a,b:2/main",
        "rediss+cluster://ada@[::1]:1,b",
        "unix://ada@/run/s.sock?db=1",
    ],
)
def test_a_password_of_the_environment_joins_the_address(url: str) -> None:
    alone, joined = parse_url(url), parse_url(with_password(url, {"TOKENBUS_REDIS_PASSWORD": SECRET}))
    assert joined.password == SECRET
    assert (joined.username, joined.nodes, joined.path, joined.safe) == ("ada", alone.nodes, alone.path, alone.safe)
    assert SECRET not in repr(joined)


def test_it_needs_no_user() -> None:
    assert parse_url(with_password("redis://host", {"TOKENBUS_REDIS_PASSWORD": "x"})).password == "x"


def test_the_address_has_the_last_word() -> None:
    assert with_password("redis://ada:own@host", {"TOKENBUS_REDIS_PASSWORD": "x"}) == "redis://ada:own@host"


def test_a_file_may_hold_it(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    env = {"TOKENBUS_REDIS_URL": "redis://ada@host", "TOKENBUS_REDIS_PASSWORD_FILE": str(file)}
    assert parse_url(load(env).redis_url or "").password == SECRET
    assert parse_url(url_in(env)).password == SECRET


def test_an_empty_missing_or_second_source_of_the_password_is_reported(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for path, problem in ((empty, "the file is empty"), (tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(SettingsError, match=problem):
            with_password("redis://host", {"TOKENBUS_REDIS_PASSWORD_FILE": str(path)})
    with pytest.raises(SettingsError, match="is set too"):
        with_password("redis://h", {"TOKENBUS_REDIS_PASSWORD_FILE": str(empty), "TOKENBUS_REDIS_PASSWORD": "x"})


def test_options_of_tls_are_read_as_what_they_mean() -> None:
    url = parse_url("rediss://h?ssl_check_hostname=false&ssl_cert_reqs=none&ssl_certfile=/c&ssl_keyfile=/k")
    assert dict(url.tls_options) == {
        "ssl_check_hostname": False,
        "ssl_cert_reqs": "none",
        "ssl_certfile": "/c",
        "ssl_keyfile": "/k",
    }


@pytest.mark.parametrize("option", ["ssl_check_hostname=no", "ssl_cert_reqs=never", "ssl_cert_reqs="])
def test_an_option_of_tls_that_means_nothing_is_refused(option: str) -> None:
    with pytest.raises(SettingsError, match="must be") as refused:
        parse_url(f"rediss://h?{option}")
    assert refused.value.where == option.partition("=")[0]
