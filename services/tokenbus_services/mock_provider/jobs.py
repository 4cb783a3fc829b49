"""Jobs in the background of Responses and Interactions: started, looked at, streamed from any event on, cancelled."""

from __future__ import annotations

import re
from http import HTTPMethod

import msgspec

from tokenbus_services.mock_provider.apis.provider_api import JobsApi
from tokenbus_services.mock_provider.plan import ResponsePlan, answer_of, delivered, event_ends, said, split_at
from tokenbus_services.mock_provider.request import HttpError, ModelRequest
from tokenbus_services.mock_provider.request_log import HttpRequest
from tokenbus_services.mock_provider.script import Turn

_PATH = re.compile(r"/v1(?:beta)?/(?:responses|interactions)/(?P<id>[\w-]+)(?P<cancel>/cancel)?")
_NUMBER = re.compile(rb'"sequence_number":(\d+)')


class Job(msgspec.Struct, kw_only=True, eq=False):
    id: str
    request: ModelRequest
    turn: Turn
    api: JobsApi
    looks: int = 0
    """How often it was looked at as a whole."""
    resumed: list[int] = []
    """Where each further stream began: behind which event."""
    cancelled: bool = False


class JobStore:
    """The jobs that were started, oldest first."""

    def __init__(self) -> None:
        self.started: list[Job] = []

    def start(self, turn: Turn, request: ModelRequest, api: JobsApi) -> Job:
        request = msgspec.structs.replace(request, key=f"{len(self.started):04d}{request.key[4:]}")
        job = Job(id=api.id_of(request), request=request, turn=turn, api=api)
        self.started.append(job)
        return job

    def of(self, http_request: HttpRequest) -> Job | None:
        """The job that a request is about; None: it is about none. Raises HttpError."""
        path = _PATH.fullmatch(http_request.path)
        if path is None or path["id"] == "input_tokens":
            return None
        job = next((job for job in self.started if job.id == path["id"]), None)
        if job is None:
            raise HttpError(404, f"no job {path['id']!r}")
        return job

    def begin(self, job: Job, attempt: int) -> ResponsePlan:
        """The answer to the call that started it."""
        if not job.request.stream:
            return answer_of(job.api.without_output(job.request, "queued"))
        return delivered(answer_of_stream(job), job.turn, job.turn.fault_of(attempt), job.api, stream=True)

    def plan(self, job: Job, http_request: HttpRequest, attempt: int) -> ResponsePlan:
        """The answer to a later call about it."""
        if http_request.path.endswith("/cancel"):
            if http_request.method != HTTPMethod.POST:
                raise HttpError(405, "cancel takes POST")
            job.cancelled = True
            return answer_of(job.api.without_output(job.request, "cancelled"))
        if http_request.method != HTTPMethod.GET:
            raise HttpError(405, "a response takes GET")
        fault = job.turn.fault_of(attempt)
        if http_request.query.get("stream") == "true":
            if not job.request.stream:
                raise HttpError(400, "stream: the response was not started with it")
            if not job.api.resumes:
                raise HttpError(400, "the mock provider streams no interaction a second time")
            after = int(http_request.query.get("starting_after", "-1"))
            job.resumed.append(after)
            body = b"".join(event for event in _events(answer_of_stream(job)) if _number_of(event) > after)
            return delivered(body, job.turn, fault, job.api, stream=True)
        job.looks += 1
        if job.cancelled or job.looks <= job.turn.queued:
            status = "cancelled" if job.cancelled else "queued"
            return answer_of(job.api.without_output(job.request, status))
        whole = msgspec.structs.replace(job.request, stream=False)
        return delivered(said(job.turn.says, whole, job.api), job.turn, fault, job.api, stream=False)


def answer_of_stream(job: Job) -> bytes:
    return said(job.turn.says, msgspec.structs.replace(job.request, stream=True), job.api)


def _events(stream: bytes) -> list[bytes]:
    return split_at(stream, event_ends(stream))


def _number_of(event: bytes) -> int:
    found = _NUMBER.search(event)
    return int(found[1]) if found else -1
