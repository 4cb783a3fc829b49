"""Every error that tokenbus raises, as one tree.

::

    TokenbusError
    ├── RequestError              the request is at fault; sending it again unchanged cannot help
    │   ├── RequestInvalid        a field is missing, of the wrong type or out of range
    │   ├── RequestTooLarge       the encoded request is over its limit
    │   └── PoisonRequest         workers died on it, one after the other
    ├── ServerError               the Redis or Valkey server
    │   ├── ServerUnavailable     no answer, refused, or gone in the middle
    │   ├── ServerTooOld          below the oldest supported version
    │   ├── ServerFull            out of memory, or the inbound stream is at its bound
    │   │   └── PublishQueueFull  as many requests of this client are on their way as may be
    │   └── DeploymentMismatch    this process and the server disagree on partitions or wire version
    ├── SettingsError             a settings file or variable, named with its place
    ├── RunError                  a run that did not finish; carries the run id
    │   ├── RunNotFound           no such run, or its records have expired
    │   ├── RunOpen               has not ended, so it cannot be tried again
    │   ├── RunNotRepeatable      cannot be tried again, or gone on with
    │   ├── RunFailed             ended `failed`
    │   ├── RunIncomplete         ended `incomplete`: the stream was cut short
    │   └── RunCancelled          ended `cancelled`
    ├── CursorTrimmed             the cursor points before the oldest entry still kept
    ├── CursorAhead               the cursor points past the newest entry
    ├── AttemptRefused            the run's attempt is over: nothing was written
    ├── DeadNotFound              no such entry in the dead stream
    ├── CannotRetry               a dead entry from which no request can be made again
    ├── RecordNotFound            the run was not recorded, or its record is kept no longer
    ├── NotStorable               a value that cannot be kept apart from its large parts: it is not JSON
    │   ├── CircularValue         it is inside itself
    │   └── NestedTooDeep         its lists and objects are nested too deep
    ├── WireError                 bytes that do not decode
    │   ├── Malformed             not the JSON, msgpack or event it should be
    │   └── TooLarge              one event or buffer over its limit
    ├── ToolFailure               a tool could not give a result
    └── BlobError                 the blob store
        ├── BlobNotFound
        ├── BlobTooLarge
        ├── BlobRefused           a bad media type, id or checksum, or an upload cut short
        ├── BlobCorrupt           what is stored is not what was: its bytes do not match its id
        ├── BlobUnauthorized      the blob service wants a token, or another one
        └── BlobUnavailable       the store or its service cannot be reached, or has no room
            └── BlobStoreFull     no room
                └── BlobQuotaExceeded  the store holds all that its settings allow

``code`` is stable and meant for programs; ``retryable`` says whether the same call may succeed
later without any change. Fields are typed attributes; the message is for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from tokenbus.events.error_info import ErrorInfo
    from tokenbus.events.requests import Generate
    from tokenbus.events.run_result import RunResult

__all__ = [
    "AttemptRefused",
    "BlobCorrupt",
    "BlobError",
    "BlobNotFound",
    "BlobQuotaExceeded",
    "BlobRefused",
    "BlobStoreFull",
    "BlobTooLarge",
    "BlobUnauthorized",
    "BlobUnavailable",
    "CannotRetry",
    "CircularValue",
    "CursorAhead",
    "CursorTrimmed",
    "DeadNotFound",
    "DeploymentMismatch",
    "Malformed",
    "NestedTooDeep",
    "NotStorable",
    "PoisonRequest",
    "PublishQueueFull",
    "RecordNotFound",
    "RequestError",
    "RequestInvalid",
    "RequestTooLarge",
    "RunCancelled",
    "RunError",
    "RunFailed",
    "RunIncomplete",
    "RunNotFound",
    "RunNotRepeatable",
    "RunOpen",
    "ServerError",
    "ServerFull",
    "ServerTooOld",
    "ServerUnavailable",
    "SettingsError",
    "TokenbusError",
    "TooLarge",
    "ToolFailure",
    "WireError",
]


class TokenbusError(Exception):
    """The root of all errors of this package."""

    code: ClassVar[str] = "tokenbus_error"
    retryable: bool = False
    """Whether the same call may succeed later without any change. Of a run that ended badly: what its error says."""


class RequestError(TokenbusError):
    """The request is at fault; it was not taken."""

    code = "request_error"
    request: Generate | Mapping[str, object] | None = None
    """From `Client.publish`: what it was given, with its id."""


class RequestInvalid(RequestError):
    """A field of the request is missing, of the wrong type or out of range."""

    code = "request_invalid"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"invalid request at {where}: {problem}")
        self.where = where
        self.problem = problem


class RequestTooLarge(RequestError):
    """The encoded request is over its limit, in bytes."""

    code = "request_too_large"

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the request has {size} bytes, the limit is {limit}; send media by blob id or url")
        self.size = size
        self.limit = limit


class PoisonRequest(RequestError):
    """Workers died on the request, one after the other: it is not tried again."""

    code = "poison"

    def __init__(self, workers: int) -> None:
        super().__init__(f"{workers} workers died while they took the request in")
        self.workers = workers


class ServerError(TokenbusError):
    """The Redis or Valkey server."""

    code = "server_error"
    request: Generate | Mapping[str, object] | None = None
    """From `Client.publish`: what it was given, with its id. Published again it is the same run."""


class ServerUnavailable(ServerError):
    """The server gave no answer, refused the connection, or went away in the middle.

    What was sent may or may not have arrived: a request with an id may be published again as it is.
    """

    code = "server_unavailable"
    retryable = True

    def __init__(self, server: str, problem: str) -> None:
        super().__init__(f"server {server} is unavailable: {problem}")
        self.server = server
        self.problem = problem


class ServerTooOld(ServerError):
    """The server is older than the oldest version that has the commands tokenbus needs."""

    code = "server_too_old"

    def __init__(self, server: str, version: str, minimum: str) -> None:
        super().__init__(f"server {server} is version {version}; tokenbus needs {minimum} or newer")
        self.server = server
        self.version = version
        self.minimum = minimum


class ServerFull(ServerError):
    """The server has no room for the entry: out of memory, or the stream is at its bound."""

    code = "server_full"
    retryable = True

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"no room in {key}: {problem}")
        self.key = key
        self.problem = problem


class PublishQueueFull(ServerFull):
    """As many requests of this client are on their way as may be; this one was not sent. Publish it again later."""

    code = "publish_queue_full"

    def __init__(self, waiting: int) -> None:
        super().__init__("this client's queue", f"{waiting} requests are on their way")
        self.waiting = waiting


class DeploymentMismatch(ServerError):
    """This process and the deployment on the server disagree on a value that all must share."""

    code = "deployment_mismatch"

    def __init__(self, name: str, ours: str, theirs: str) -> None:
        super().__init__(f"{name} is {ours} here but {theirs} on the server: all processes must use the same")
        self.name = name
        self.ours = ours
        self.theirs = theirs


class SettingsError(TokenbusError):
    """A setting is missing or wrong; says in which file or variable, and at which key."""

    code = "settings_error"

    def __init__(self, source: str, where: str, problem: str) -> None:
        super().__init__(f"{source}: {where}: {problem}")
        self.source = source
        self.where = where
        self.problem = problem


class RunError(TokenbusError):
    """A run that did not finish as asked."""

    code = "run_error"

    def __init__(self, run: str, message: str, result: RunResult | None = None) -> None:
        super().__init__(message)
        self.run = run
        self.result = result
        """What the run gave before it ended (from `Client.result`, its `Response`); None if nothing is known of it."""


class RunNotFound(RunError):
    """No such run is known, or its records have expired."""

    code = "run_not_found"

    def __init__(self, run: str) -> None:
        super().__init__(run, f"run {run} is not known: never accepted, or its records have expired")


class RunOpen(RunError):
    """The run has not ended: follow it, or cancel it first."""

    code = "run_open"
    retryable = True

    def __init__(self, run: str) -> None:
        super().__init__(run, f"run {run} has not ended: it cannot be tried again while it is open")


class RunNotRepeatable(RunError):
    """The run cannot be tried again, or not gone on with; ``problem`` says why."""

    code = "run_not_repeatable"

    def __init__(self, run: str, problem: str) -> None:
        super().__init__(run, f"run {run} cannot be taken up again: {problem}")
        self.problem = problem


class RunFailed(RunError):
    """The run ended `failed`."""

    code = "run_failed"

    def __init__(self, run: str, error: ErrorInfo, result: RunResult | None = None) -> None:
        super().__init__(run, f"run {run} failed: {error.code}: {error.message}", result)
        self.error = error
        self.retryable = error.retryable


class RunIncomplete(RunError):
    """The run ended `incomplete`: its stream was cut short. The partial output is in ``result``."""

    code = "run_incomplete"

    def __init__(self, run: str, reason: str, result: RunResult | None = None) -> None:
        super().__init__(run, f"run {run} is incomplete: {reason}", result)
        self.reason = reason
        self.retryable = bool(result and result.error and result.error.retryable)


class RunCancelled(RunError):
    """The run ended `cancelled`. The partial output is in ``result``."""

    code = "run_cancelled"

    def __init__(self, run: str, reason: str | None, result: RunResult | None = None) -> None:
        super().__init__(run, f"run {run} was cancelled" + (f": {reason}" if reason else ""), result)
        self.reason = reason


class CursorTrimmed(TokenbusError):
    """The cursor points before the oldest entry still kept: what lies between is gone."""

    code = "cursor_trimmed"

    def __init__(self, key: str, cursor: str, oldest: str) -> None:
        super().__init__(f"{key}: entries after {cursor} were trimmed; the oldest kept is {oldest}")
        self.key = key
        self.cursor = cursor
        self.oldest = oldest


class CursorAhead(TokenbusError):
    """The cursor points past the newest entry: it belongs to another run or deployment, or a fail-over lost what it
    had seen. Waiting at it would be silent."""

    code = "cursor_ahead"

    def __init__(self, key: str, cursor: str, newest: str) -> None:
        super().__init__(f"{key}: the cursor {cursor} is past the newest entry, {newest}")
        self.key = key
        self.cursor = cursor
        self.newest = newest


class AttemptRefused(TokenbusError):
    """The attempt may write nothing more: the run ended, was cancelled, or went on with a newer attempt."""

    code = "attempt_refused"

    def __init__(self, run: str, attempt: int, reason: str) -> None:
        super().__init__(f"run {run}: attempt {attempt} is refused: {reason}")
        self.run = run
        self.attempt = attempt
        self.reason = reason


class DeadNotFound(TokenbusError):
    """The dead stream has no such entry: it was retried, dropped or trimmed, or never was."""

    code = "dead_not_found"

    def __init__(self, entry: str) -> None:
        super().__init__(f"no dead entry {entry}")
        self.entry = entry


class CannotRetry(TokenbusError):
    """From this dead entry no request can be made again; it stays where it is."""

    code = "cannot_retry"

    def __init__(self, entry: str, problem: str) -> None:
        super().__init__(f"dead entry {entry}: {problem}")
        self.entry = entry
        self.problem = problem


class RecordNotFound(TokenbusError):
    """There is no debug record of the run: it was not recorded, is not over, or its record is kept no longer."""

    code = "record_not_found"

    def __init__(self, run: str) -> None:
        super().__init__(f"no record of run {run}; `tokenbus records` lists those there are")
        self.run = run


class NotStorable(TokenbusError):
    """`sanitize_for_storage` was given what is not JSON. ``where`` is its place, as a JSON Pointer."""

    code = "not_storable"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"value at {where}: {problem}")
        self.where = where
        self.problem = problem


class CircularValue(NotStorable):
    """A list or object is inside itself."""

    code = "circular_value"

    def __init__(self, where: str) -> None:
        super().__init__(where, "it is inside itself")


class NestedTooDeep(NotStorable):
    """Lists and objects are nested deeper than ``limit``."""

    code = "nested_too_deep"

    def __init__(self, where: str, limit: int) -> None:
        super().__init__(where, f"nested deeper than {limit}")
        self.limit = limit


class WireError(TokenbusError):
    """Bytes that do not decode."""

    code = "wire_error"


class Malformed(WireError):
    """Bytes that are not the JSON, msgpack or event they should be."""

    code = "malformed"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class TooLarge(WireError):
    """One event or buffer is over its limit, both counted in ``unit``."""

    code = "too_large"

    def __init__(self, where: str, size: int, limit: int, unit: str = "bytes") -> None:
        super().__init__(f"{where}: {size} {unit}, the limit is {limit}")
        self.where = where
        self.size = size
        self.limit = limit
        self.unit = unit


class ToolFailure(TokenbusError):
    """A tool could not give a result; the model sees ``problem`` as an error result."""

    code = "tool_failure"

    def __init__(self, tool: str, kind: str, problem: str) -> None:
        super().__init__(f"tool {tool}: {kind}: {problem}")
        self.tool = tool
        self.kind = kind
        self.problem = problem


class BlobError(TokenbusError):
    """The blob store."""

    code = "blob_error"


class BlobNotFound(BlobError):
    """No blob has this id, or it has expired."""

    code = "blob_not_found"

    def __init__(self, blob_id: str) -> None:
        super().__init__(f"no blob {blob_id}")
        self.blob_id = blob_id


class BlobTooLarge(BlobError):
    """The body is over the store's limit, in bytes."""

    code = "blob_too_large"

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the blob has {size} bytes or more, the limit is {limit}")
        self.size = size
        self.limit = limit


class BlobRefused(BlobError):
    """The blob was not stored or not given out: bad media type or id, wrong checksum, or an upload cut short."""

    code = "blob_refused"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class BlobCorrupt(BlobError):
    """What is stored under this id has other bytes: a disk or a store is at fault. To store it again mends it."""

    code = "blob_corrupt"

    def __init__(self, blob_id: str, problem: str = "the stored bytes do not match their checksum") -> None:
        super().__init__(f"{blob_id}: {problem}")
        self.blob_id = blob_id
        self.problem = problem


class BlobUnauthorized(BlobError):
    """The blob service wants a token (`TOKENBUS_BLOB_TOKEN`), or another one."""

    code = "blob_unauthorized"

    def __init__(self, where: str) -> None:
        super().__init__(f"{where}: the blob service takes no request without its token")
        self.where = where


class BlobUnavailable(BlobError):
    """The store, or the service before it, cannot be reached or gave an error of its own.

    An upload may or may not have been stored; storing the same content again is harmless.
    """

    code = "blob_unavailable"
    retryable = True

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class BlobStoreFull(BlobUnavailable):
    """The store has no room for the blob; nothing was stored."""

    code = "blob_store_full"


class BlobQuotaExceeded(BlobStoreFull):
    """The store holds all the bytes that its settings allow; nothing was stored. Room comes when blobs expire."""

    code = "blob_quota_exceeded"
