"""What TOKENBUS_REDIS_URL may hold, and that no form of it shows its password."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.bus.server.url import ServerUrl, parse_url
from tokenbus.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://localhost", ServerUrl(nodes=(("localhost", 6379),))),
        ("redis://localhost/", ServerUrl(nodes=(("localhost", 6379),))),
        ("valkey://10.0.0.1:7000/3", ServerUrl(nodes=(("10.0.0.1", 7000),), db=3)),
        ("redis://:pw@h", ServerUrl(nodes=(("h", 6379),), password="pw")),
        ("redis://u:p%40%2F@h:1", ServerUrl(nodes=(("h", 1),), username="u", password="p@/")),
        ("redis://[::1]:6380", ServerUrl(nodes=(("::1", 6380),))),
        ("rediss://h", ServerUrl(nodes=(("h", 6379),), tls=True)),
        (
            "valkeys://h/1?ssl_ca_certs=/ca.pem",
            ServerUrl(nodes=(("h", 6379),), db=1, tls=True, tls_options=(("ssl_ca_certs", "/ca.pem"),)),
        ),
        ("unix:///run/my%20redis.sock", ServerUrl(path="/run/my redis.sock")),
        ("unix://u:p@/r.sock?db=2", ServerUrl(path="/r.sock", db=2, username="u", password="p")),
        (
            "redis+sentinel://u:p@a:1,b/main/2",
            ServerUrl(
                topology="sentinel", nodes=(("a", 1), ("b", 26379)), master="main", db=2, username="u", password="p"
            ),
        ),
        (
            "rediss+sentinel://a/main",
            ServerUrl(topology="sentinel", nodes=(("a", 26379),), master="main", tls=True),
        ),
        ("redis+cluster://a:1,b", ServerUrl(topology="cluster", nodes=(("a", 1), ("b", 6379)))),
        ("valkeys+cluster://a", ServerUrl(topology="cluster", nodes=(("a", 6379),), tls=True)),
    ],
)
def test_each_form_is_read(text: str, expected: ServerUrl):
    assert parse_url(text) == expected


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "scheme"),
        ("localhost:6379", "scheme"),
        ("http://h", "scheme"),
        ("redis+proxy://h", "scheme"),
        ("unixs:///a", "scheme"),
        ("redis://", "host"),
        ("redis://a,b", "host"),
        ("redis://a b", "host"),
        ("redis://::1", "host"),
        ("redis://[::1", "host"),
        ("redis://h:six", "host"),
        ("redis://h:0", "port"),
        ("redis://h:65536", "port"),
        ("redis://h/one", "database"),
        ("redis://h/-1", "database"),
        ("redis://h/1/2", "path"),
        ("redis://h?db=1", "options"),
        ("redis://h?ssl_ca_certs=x", "options"),
        ("rediss://h?socket_timeout=1", "options"),
        ("redis://:pa#ss@h", "password"),
        ("redis+sentinel://h", "path"),
        ("redis+sentinel://h//1", "path"),
        ("redis+cluster://h/1", "path"),
        ("unix://relative.sock", "path"),
        ("unix:///", "path"),
        ("unix:///a?db=x", "database"),
    ],
)
def test_any_other_text_is_refused_with_its_place(text: str, where: str):
    with pytest.raises(SettingsError) as refused:
        parse_url(text)
    assert (refused.value.source, refused.value.where) == ("redis_url", where)


@pytest.mark.parametrize(
    "text",
    [
        "redis://u:secret@h:1/2",
        "rediss://:secret@[::1]?ssl_certfile=secret",
        "unix://u:secret@/a?db=1",
        "redis+sentinel://u:secret@a:1,b/main/3",
        "redis+cluster://:secret@a:1,b:2",
    ],
)
def test_neither_the_safe_form_nor_the_repr_of_the_url_shows_the_password(text: str):
    url = parse_url(text)
    assert "secret" not in url.safe
    assert "secret" not in repr(url).replace("('ssl_certfile', 'secret')", "")
    again = parse_url(url.safe)
    assert (again.topology, again.nodes, again.path, again.db, again.master, again.username) == (
        url.topology,
        url.nodes,
        url.path,
        url.db,
        url.master,
        url.username,
    )


@given(st.sampled_from(["redis", "rediss", "unix", "redis+sentinel", "redis+cluster"]), st.text(max_size=20))
def test_any_text_is_an_address_or_a_settings_error(scheme: str, rest: str):
    try:
        url = parse_url(f"{scheme}://{rest}")
    except SettingsError:
        return
    assert url.nodes or url.path


@given(st.text(alphabet="sSeEcCrR3t/?#[]@:,% ", min_size=1))
def test_a_refusal_repeats_nothing_of_the_url(password: str):
    with pytest.raises(SettingsError) as refused:
        parse_url(f"redis://:{password}qwx@h:1/x")
    assert "qwx" not in str(refused.value)
