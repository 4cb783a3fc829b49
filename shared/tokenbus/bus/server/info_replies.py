"""Replies of XINFO and its like in a pipeline, for views of a deployment: a key that is missing is not an error."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError


def checked(reply: Any) -> Any:
    """Return the reply; None for a missing key. Raises the reply if it is another error."""
    if isinstance(reply, ResponseError) and "no such key" in str(reply):
        return None
    if isinstance(reply, Exception):
        raise reply
    return reply


def group_in(reply: Any, name: str) -> dict[str, Any]:
    """Return what XINFO GROUPS says about this group; empty if there is none."""
    groups: list[dict[str, Any]] = checked(reply) or []
    nothing: dict[str, Any] = {}
    return next((group for group in groups if group["name"] == name.encode()), nothing)
