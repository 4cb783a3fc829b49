"""A cursor as text and back."""

from __future__ import annotations

import pytest

from tokenbus.client.subscriptions.cursor import Cursor
from tokenbus.errors import Malformed


def test_a_cursor_is_read_back_from_its_text():
    cursor = Cursor("visible", ("1700000000000-0", "0-0", "-"))
    assert str(cursor) == "visible:1700000000000-0,0-0,-"
    assert Cursor.parse(str(cursor)) == cursor


@pytest.mark.parametrize(
    "text", ["", "visible", "visible:", "raw:0-0", "visible:0-0,", "visible:x", "visible:1", ":0-0"]
)
def test_text_that_is_no_cursor_is_refused(text: str):
    with pytest.raises(Malformed, match="was not made by a subscription"):
        Cursor.parse(text)
