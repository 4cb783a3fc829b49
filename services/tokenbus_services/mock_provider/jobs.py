"""Jobs in the background, as the Responses API has them: started, looked at, streamed from any event on, cancelled."""

from __future__ import annotations

import re
from http import HTTPMethod

import msgspec

from tokenbus_services.mock_provider.apis.openai_responses import mock_api
from tokenbus_services.mock_provider.plan import ResponsePlan, answer_of, delivered, event_ends, said, split_at
from tokenbus_services.mock_provider.request import HttpError, ModelRequest
from tokenbus_services.mock_provider.request_log import HttpRequest
from tokenbus_services.mock_provider.script import Turn

_PATH = re.compile(r"/v1/responses/(?P<id>[\w-]+)(?P<cancel>/cancel)?")
_NUMBER = re.compile(rb'"sequence_number":(\d+)')


class Job(msgspec.Struct, kw_only=True, eq=False):
    """One job that was started."""

    id: str
    request: ModelRequest
    turn: Turn
    looks: int = 0
    """How often it was looked at as a whole."""
    resumed: list[int] = []
    """Where each further stream began: behind which event."""
    cancelled: bool = False


class JobStore:
    """The jobs that were started, oldest first."""

    def __init__(self) -> None:
        self.started: list[Job] = []

    def start(self, turn: Turn, request: ModelRequest) -> Job:
        """Start a job for a request."""
        request = msgspec.structs.replace(request, key=f"{len(self.started):04d}{request.key[4:]}")
        job = Job(id=f"resp_{request.key[:28]}", request=request, turn=turn)
        self.started.append(job)
        return job

    def of(self, http_request: HttpRequest) -> Job | None:
        """The job that a request is about; None: it is about none. Raises HttpError."""
        path = _PATH.fullmatch(http_request.path)
        if path is None or path["id"] == "input_tokens":
            return None
        job = next((job for job in self.started if job.id == path["id"]), None)
        if job is None:
            raise HttpError(404, f"no response {path['id']!r}")
        return job

    def begin(self, job: Job, attempt: int) -> ResponsePlan:
        """The answer to the call that started it."""
        if not job.request.stream:
            return answer_of(mock_api.without_output(job.request, "queued"))
        return delivered(answer_of_stream(job), job.turn, job.turn.fault_of(attempt), mock_api, stream=True)

    def plan(self, job: Job, http_request: HttpRequest, attempt: int) -> ResponsePlan:
        """The answer to a later call about it."""
        if http_request.path.endswith("/cancel"):
            if http_request.method != HTTPMethod.POST:
                raise HttpError(405, "cancel takes POST")
            job.cancelled = True
            return answer_of(mock_api.without_output(job.request, "cancelled"))
        if http_request.method != HTTPMethod.GET:
            raise HttpError(405, "a response takes GET")
        fault = job.turn.fault_of(attempt)
        if http_request.query.get("stream") == "true":
            if not job.request.stream:
                raise HttpError(400, "stream: the response was not started with it")
            after = int(http_request.query.get("starting_after", "-1"))
            job.resumed.append(after)
            body = b"".join(event for event in _events(answer_of_stream(job)) if _number_of(event) > after)
            return delivered(body, job.turn, fault, mock_api, stream=True)
        job.looks += 1
        if job.cancelled or job.looks <= job.turn.queued:
            status = "cancelled" if job.cancelled else "queued"
            return answer_of(mock_api.without_output(job.request, status))
        whole = msgspec.structs.replace(job.request, stream=False)
        return delivered(said(job.turn.says, whole, mock_api), job.turn, fault, mock_api, stream=False)


def answer_of_stream(job: Job) -> bytes:
    """All events of the job."""
    return said(job.turn.says, msgspec.structs.replace(job.request, stream=True), mock_api)


def _events(stream: bytes) -> list[bytes]:
    return split_at(stream, event_ends(stream))


def _number_of(event: bytes) -> int:
    found = _NUMBER.search(event)
    return int(found[1]) if found else -1
