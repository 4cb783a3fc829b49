"""Responses in the background: https://developers.openai.com/api/docs/guides/background.

`GET /responses/{id}` tells how one is; with `stream=true&starting_after=N` it sends the events after number N, but only
of one that was started with `stream`. `POST /responses/{id}/cancel` ends it.
"""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from tokenbus.events.requests import Generate
from tokenbus.providers.api import HttpCall, JobApi, JobSeen

RUNNING = ("queued", "in_progress")
ENDED = ("completed", "incomplete", "failed", "cancelled", "expired")


class _Response(msgspec.Struct):
    id: str = ""
    status: str = ""


class _Event(_Response):
    """An event of the stream, or a response, which has no type."""

    type: str = ""
    sequence_number: int = -1
    response: _Response | None = None


_event = msgspec.json.Decoder(_Event)


class ResponseJobs:
    """See `tokenbus.providers.api.JobApi`."""

    path = "/responses"
    resumes = True

    def wanted(self, request: Generate) -> bool:
        """See `JobApi.wanted`."""
        return bool((request.extra or {}).get("background"))

    def read(self, data: bytes) -> JobSeen:
        """See `JobApi.read`. The event's name tells the end, because some servers leave the status as it was."""
        try:
            event = _event.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return JobSeen()
        if not event.type:
            return JobSeen(event.id, over=bool(event.id) and event.status in ENDED)
        over = event.type.removeprefix("response.") in ENDED
        named = event.response.id if event.response else ""
        return JobSeen(named, event.sequence_number, over, failed=event.type == "error")

    def resume(self, job: str, after: int) -> HttpCall:
        """See `JobApi.resume`."""
        query = {"stream": "true"} | ({"starting_after": str(after)} if after >= 0 else {})
        return _call(job, method="GET", query=query)

    def look(self, job: str) -> HttpCall:
        """See `JobApi.look`."""
        return _call(job, method="GET")

    def cancel(self, job: str) -> HttpCall:
        """See `JobApi.cancel`."""
        return _call(job, "/cancel")

    def last_event(self, response: bytes) -> bytes:
        """See `JobApi.last_event`."""
        status = _event.decode(response).status
        kind = f"response.{'failed' if status == 'expired' else status}".encode()
        return b'event: %b\ndata: {"type":"%b","response":%b}\n\n' % (
            kind,
            kind,
            msgspec.json.format(response, indent=-1),
        )


def _call(job: str, then: str = "", **options: object) -> HttpCall:
    call = HttpCall(path=f"/{quote(job, safe='')}{then}", body=b"", headers={})
    return msgspec.structs.replace(call, **options)


jobs: JobApi = ResponseJobs()
