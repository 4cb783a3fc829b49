"""Interactions in the background: https://ai.google.dev/gemini-api/docs/background-execution.

`GET /interactions/{id}` tells how one is, with the steps so far; `POST /interactions/{id}/cancel` ends it. A stream can
be read on from `last_event_id`, but its events need not have an id. So one that was cut is looked at until it has
ended, and the decoder emits the steps that the stream lacked.
"""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from tokenbus.events.requests import Generate
from tokenbus.providers.api import HttpCall, JobApi, JobSeen

RUNNING = ("queued", "in_progress", "")


class _Interaction(msgspec.Struct):
    id: str = ""
    status: str = ""


class _Event(_Interaction):
    """An event of the stream, or an interaction, which has no type."""

    event_type: str = ""
    interaction: _Interaction | None = None


_event = msgspec.json.Decoder(_Event)


class InteractionJobs:
    """See `tokenbus.providers.api.JobApi`."""

    path = "/interactions"
    resumes = False

    def wanted(self, request: Generate) -> bool:
        """See `JobApi.wanted`."""
        return bool((request.extra or {}).get("background"))

    def read(self, data: bytes) -> JobSeen:
        """See `JobApi.read`. Events have no numbers."""
        try:
            event = _event.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return JobSeen()
        seen = event.interaction or event
        over = event.event_type in ("", "interaction.completed") and bool(seen.id) and seen.status not in RUNNING
        return JobSeen(seen.id, over=over, failed=event.event_type == "error")

    def resume(self, job: str, after: int) -> HttpCall:
        """See `JobApi.resume`."""
        return _call(job, method="GET", query={"stream": "true"})

    def look(self, job: str) -> HttpCall:
        """See `JobApi.look`."""
        return _call(job, method="GET")

    def cancel(self, job: str) -> HttpCall:
        """See `JobApi.cancel`."""
        return _call(job, "/cancel")

    def last_event(self, response: bytes) -> bytes:
        """See `JobApi.last_event`."""
        interaction = msgspec.json.format(response, indent=-1)
        return b'event: interaction.completed\ndata: {"interaction":%b,"event_type":"interaction.completed"}\n\n' % (
            interaction
        )


def _call(job: str, then: str = "", **options: object) -> HttpCall:
    call = HttpCall(path=f"/{quote(job, safe='')}{then}", body=b"", headers={})
    return msgspec.structs.replace(call, **options)


jobs: JobApi = InteractionJobs()
