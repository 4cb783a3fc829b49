"""A stream that ends early is recognised: the body is over, and the provider's own end was not in it.

Such an attempt ends in `Cut`, never in `Done`: its text may be a part. What follows (a retry, `continue`, or a run that
ends `incomplete`) is the run's business (`tokenbus.core.run.attempts`).
"""

from __future__ import annotations

import re

from tokenbus.events.normalized import Cut

DONE = b"[DONE]"
"""What OpenAI's APIs and their like send last."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)', re.DOTALL)


def cut_before(end: str, *, began: bool, content: str) -> Cut:
    """The body ended before ``end``, the provider's own end. ``began``: some of the ``content`` had come."""
    return Cut(f"the stream ended before {end}" if began else f"the body held no {content}")


def cut_inside_event(data: bytes) -> Cut | None:
    """The end of a body whose last event cannot be decoded; None: the event is whole, and so it is invalid."""
    return Cut("the body ended inside an event") if is_unfinished(data) else None


def is_cut_done(data: bytes) -> bool:
    """Whether the last event of a body is the beginning of `DONE`: what the provider sends was complete before it."""
    return data != DONE and DONE.startswith(data)


def is_unfinished(data: bytes) -> bool:
    """Whether JSON stops in the middle. At the end of a body this means a truncated body, not an invalid one."""
    bones = _STRING.sub(lambda m: b"" if m[1] else b'"', data)
    return b'"' in bones or sum(bones.count(b) for b in (b"{", b"[")) > sum(bones.count(b) for b in (b"}", b"]"))
