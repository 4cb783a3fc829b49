"""What a provider call gets in addition to its request."""

from __future__ import annotations

import msgspec

from tokenbus_services.fetcher.calls.call_spans import CallFacts
from tokenbus_services.fetcher.calls.silent_calls import SilentCalls
from tokenbus_services.fetcher.image_offload.offload import ImageStore
from tokenbus_services.fetcher.limits.token_estimate import TokenTally
from tokenbus_services.settings import LimitSettings


class CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Data for a call in addition to its request."""

    tally: TokenTally | None = None
    """Receives the answer, to count tokens for the limits."""
    images: ImageStore | None = None
    """Where the answer's images are stored."""
    answer_bytes: int = LimitSettings().answer_bytes
    """Maximum size of the decoded answer."""
    again: bool = False
    """Whether the caller repeats the call after `CredentialsRejected`."""
    called_ms: int = 0
    """Unix time of the call, for those who measure it."""
    facts: CallFacts | None = None
    """Notes about the call, for its span."""
    silent: SilentCalls | None = None
    """Counts the call while it has no byte of an answer, from `provider_call.SILENT_S` on."""


PLAIN = CallOptions()
