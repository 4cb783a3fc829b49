"""The exception hierarchy of tokenbus.

::

    TokenbusError
    ├── RequestError              the request is at fault; resending it unchanged does not help
    │   ├── RequestInvalid        a field is missing, has the wrong type or is out of range
    │   ├── RequestTooLarge       the encoded request exceeds its limit
    │   ├── InputRejected         its policies did not let its texts pass
    │   └── PoisonRequest         several workers crashed while accepting it
    ├── ServerError               the Redis or Valkey server
    │   ├── ServerUnavailable     no answer, connection refused, or connection lost
    │   │   └── WriteNotReplicated  too few replicas have a durable write, or no disk
    │   ├── ServerTooOld          older than the minimum version
    │   ├── ServerFull            out of memory, or the inbound stream is full
    │   │   └── PublishQueueFull  this client has too many requests in flight
    │   └── DeploymentMismatch    this process and the server disagree on partitions or wire version
    ├── SettingsError             an invalid setting; names the file or variable and the key
    ├── RunError                  a run that did not finish; carries the run id
    │   ├── RunNotFound           no such run, or its records have expired
    │   ├── RunLost               it was open, and the server has nothing of it any more
    │   ├── RunOpen               still running, so it cannot be retried
    │   ├── RunNotRepeatable      cannot be retried or resumed
    │   ├── RunFailed             ended `failed`
    │   ├── RunIncomplete         ended `incomplete`: the stream was cut off
    │   └── RunCancelled          ended `cancelled`
    ├── SessionNotFound           no such session, or it has expired
    ├── SessionReplaced           the cursor is of a deleted session, and there is a new one of its name
    ├── AppendPending             sent to a session, and not accepted yet
    ├── WaitNotFound              the run does not wait for this, or not any more
    ├── AlreadyDecided            somebody decided it before
    ├── DecisionPending           sent to a run that waits, and not applied yet
    ├── CursorTrimmed             the cursor is older than the oldest retained entry
    ├── CursorAhead               the cursor is newer than the newest entry
    ├── AttemptRefused            the attempt is over: nothing was written
    ├── DeadNotFound              no such entry in the dead stream
    ├── RepartitionRefused        the number of partitions cannot be changed so, or not now
    ├── CannotRetry               a dead entry that cannot be turned into a request
    ├── RecordNotFound            the run was not recorded, or its record has expired
    ├── NotStorable               a value whose large parts cannot be moved to blobs: it is not JSON
    │   ├── CircularValue         it contains itself
    │   └── NestedTooDeep         its lists and objects are nested too deeply
    ├── WireError                 bytes that cannot be decoded
    │   ├── Malformed             not the expected JSON, msgpack or event
    │   └── TooLarge              an event or buffer exceeds its limit
    ├── ToolFailure               a tool could not produce a result
    └── BlobError                 the blob store
        ├── BlobNotFound
        ├── BlobTooLarge
        ├── BlobRefused           a bad media type, id or checksum, or a truncated upload
        ├── BlobCorrupt           the stored bytes do not match the id
        ├── BlobUnauthorized      the blob service requires a token, or the token is wrong
        └── BlobUnavailable       the store or its service is unreachable or has no space
            └── BlobStoreFull     no space
                └── BlobQuotaExceeded  the store has reached its configured quota

``code`` is stable and meant for programs. ``retryable`` says whether the same call may succeed later without any
change. Fields are typed attributes; the message is for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from tokenbus.events.error_info import ErrorInfo
    from tokenbus.events.requests import Append, Generate
    from tokenbus.events.run_result import RunResult
    from tokenbus.events.waits import WaitFate


class TokenbusError(Exception):
    """Base class of all errors of this package."""

    code: ClassVar[str] = "tokenbus_error"
    retryable: bool = False
    """Whether the same call may succeed later without any change. For a run that ended badly, this comes from its
    error.
    """
    told: ClassVar[str | None] = None
    """What a client of a gateway or a run reads instead of the text, if that may name hosts or quote other errors."""


def public_reason(error: BaseException, otherwise: str) -> str:
    """What a client may read of an error: the code and text of one of ours. The text of any other may hold anything,
    so it is ``otherwise``, and only logs and dead letters have the text.
    """
    return f"{error.code}: {error.told or error}" if isinstance(error, TokenbusError) else otherwise


class RequestError(TokenbusError):
    """The request is at fault and was not accepted."""

    code = "request_error"
    request: Generate | Append | Mapping[str, object] | None = None
    """Set by `Client.publish`: the given request, with its id."""


class RequestInvalid(RequestError):
    """A request field is missing, has the wrong type or is out of range."""

    code = "request_invalid"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"invalid request at {where}: {problem}")
        self.where = where
        self.problem = problem


class RequestTooLarge(RequestError):
    """The encoded request exceeds its limit, in bytes."""

    code = "request_too_large"

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the request has {size} bytes, the limit is {limit}; send media by blob id or url")
        self.size = size
        self.limit = limit


class InputRejected(RequestError):
    """The policies that judge what goes in did not let a text pass, or could not judge it."""

    code = "input_rejected"

    def __init__(self, judged: str, problem: str, *, retryable: bool = False) -> None:
        super().__init__(problem)
        self.judged = judged
        """The run in which they judged it."""
        self.problem = problem
        self.retryable = retryable


class PoisonRequest(RequestError):
    """Several workers crashed while accepting the request. It is not retried."""

    code = "poison"

    def __init__(self, workers: int) -> None:
        super().__init__(f"{workers} workers crashed while accepting the request")
        self.workers = workers


class DeadNotFound(TokenbusError):
    """The dead stream has no such entry: it was retried, dropped or trimmed, or never existed."""

    code = "dead_not_found"

    def __init__(self, entry: str) -> None:
        super().__init__(f"no dead entry {entry}")
        self.entry = entry


class CannotRetry(TokenbusError):
    """This dead entry cannot be turned into a request; it stays in the dead stream."""

    code = "cannot_retry"

    def __init__(self, entry: str, problem: str) -> None:
        super().__init__(f"dead entry {entry}: {problem}")
        self.entry = entry
        self.problem = problem


class ServerError(TokenbusError):
    """An error of the Redis or Valkey server."""

    code = "server_error"
    told = "the bus cannot take requests now"
    request: Generate | Append | Mapping[str, object] | None = None
    """Set by `Client.publish`: the given request, with its id. Publishing it again continues the same run."""


class ServerUnavailable(ServerError):
    """The server did not answer, refused the connection, or the connection was lost.

    The command may or may not have been executed. A request with an id can safely be published again.
    """

    code = "server_unavailable"
    retryable = True

    def __init__(self, server: str, problem: str) -> None:
        super().__init__(f"server {server} is unavailable: {problem}")
        self.server = server
        self.problem = problem


class WriteNotReplicated(ServerUnavailable):
    """The server has the write, but not yet the replicas or the disk that the deployment's `durability` names.

    A request with an id can safely be published again, and is then waited for again.
    """

    code = "write_not_replicated"


class ServerTooOld(ServerError):
    """The server is older than the oldest supported version."""

    code = "server_too_old"

    def __init__(self, server: str, version: str, minimum: str) -> None:
        super().__init__(f"server {server} is version {version}; tokenbus needs {minimum} or newer")
        self.server = server
        self.version = version
        self.minimum = minimum


class ServerFull(ServerError):
    """The server has no room for the entry: out of memory, or the stream is full."""

    code = "server_full"
    retryable = True

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"no room in {key}: {problem}")
        self.key = key
        self.problem = problem


class PublishQueueFull(ServerFull):
    """This client has too many requests in flight; this one was not sent. Publish it again later."""

    code = "publish_queue_full"

    def __init__(self, waiting: int) -> None:
        super().__init__("this client's queue", f"{waiting} requests are in flight")
        self.waiting = waiting


class DeploymentMismatch(ServerError):
    """This process and the deployment on the server disagree on a value that all processes must share."""

    code = "deployment_mismatch"

    def __init__(self, name: str, ours: str, theirs: str) -> None:
        super().__init__(f"{name} is {ours} here but {theirs} on the server: all processes must use the same")
        self.name = name
        self.ours = ours
        self.theirs = theirs


class RepartitionRefused(TokenbusError):
    """The number of partitions cannot be changed in this way, or not now."""

    code = "repartition_refused"


class SettingsError(TokenbusError):
    """A setting is missing or invalid. Names the file or variable, and the key."""

    code = "settings_error"

    def __init__(self, source: str, where: str, problem: str) -> None:
        super().__init__(f"{source}: {where}: {problem}")
        self.source = source
        self.where = where
        self.problem = problem


class RunError(TokenbusError):
    """A run that did not finish as requested."""

    code = "run_error"

    def __init__(self, run: str, message: str, result: RunResult | None = None) -> None:
        super().__init__(message)
        self.run = run
        self.result = result
        """What the run gave before it ended (from `Client.result`, its `Response`); None if nothing is known of it."""


class RunNotFound(RunError):
    """The run is unknown, or its records have expired."""

    code = "run_not_found"

    def __init__(self, run: str, unheard: str | None = None) -> None:
        """``unheard``: a prefix with which no deployment has begun."""
        nobody = f"no deployment has begun with the prefix {unheard!r}, so nobody takes its requests"
        why = nobody if unheard else "never accepted, or its records have expired"
        super().__init__(run, f"unknown run {run}: {why}")
        self.unheard = unheard


class RunLost(RunError):
    """The run was open, and the server has nothing of it any more: its keys were deleted or have expired.

    Publish the request again, under a new id.
    """

    code = "run_lost"
    retryable = True

    def __init__(self, run: str) -> None:
        super().__init__(run, f"run {run} was open, and the server has nothing of it any more")


class RunOpen(RunError):
    """The run is still open: follow it, or cancel it first."""

    code = "run_open"
    retryable = True

    def __init__(self, run: str) -> None:
        super().__init__(run, f"run {run} is still open and cannot be retried")


class RunNotRepeatable(RunError):
    """The run cannot be retried or resumed; ``problem`` says why."""

    code = "run_not_repeatable"

    def __init__(self, run: str, problem: str) -> None:
        super().__init__(run, f"run {run} cannot be retried or resumed: {problem}")
        self.problem = problem


class RunFailed(RunError):
    """The run ended `failed`."""

    code = "run_failed"

    def __init__(self, run: str, error: ErrorInfo, result: RunResult | None = None) -> None:
        super().__init__(run, f"run {run} failed: {error.code}: {error.message}", result)
        self.error = error
        self.retryable = error.retryable


class RunIncomplete(RunError):
    """The run ended `incomplete`: its stream was cut off. ``result`` has the partial output."""

    code = "run_incomplete"

    def __init__(self, run: str, reason: str, result: RunResult | None = None) -> None:
        super().__init__(run, f"run {run} is incomplete: {reason}", result)
        self.reason = reason
        self.retryable = bool(result and result.error and result.error.retryable)


class RunCancelled(RunError):
    """The run ended `cancelled`. ``result`` has the partial output."""

    code = "run_cancelled"

    def __init__(self, run: str, reason: str | None, result: RunResult | None = None) -> None:
        super().__init__(run, f"run {run} was cancelled" + (f": {reason}" if reason else ""), result)
        self.reason = reason


class SessionNotFound(TokenbusError):
    """The session is unknown: nobody configured it, or it was deleted or has expired."""

    code = "session_not_found"

    def __init__(self, session: str) -> None:
        super().__init__(f"unknown session {session}: never configured, deleted or expired")
        self.session = session


class SessionReplaced(TokenbusError):
    """The cursor, or the reader, is of a session that was deleted, and there is a new one of its name: read that from
    its beginning.
    """

    code = "session_replaced"

    def __init__(self, session: str) -> None:
        super().__init__(f"session {session} was deleted and made again: the cursor is of the former one")
        self.session = session


class AppendPending(TokenbusError):
    """The append was sent, and no intake has accepted it yet. Repeat it with the same id, or ask for its fate."""

    code = "append_pending"
    retryable = True

    def __init__(self, session: str, append: str, waited_s: float) -> None:
        super().__init__(f"session {session}: the append {append} was not accepted within {waited_s:g} s")
        self.session = session
        self.append = append
        self.waited_s = waited_s


class WaitNotFound(TokenbusError):
    """The run does not wait for this: it never did, or the run has ended."""

    code = "wait_not_found"

    def __init__(self, run: str, wait: str) -> None:
        super().__init__(f"run {run} does not wait for {wait}: it never did, or the run has ended")
        self.run = run
        self.wait = wait


class AlreadyDecided(TokenbusError):
    """Somebody decided the wait before, or its deadline did. This decision changed nothing."""

    code = "already_decided"

    def __init__(self, run: str, fate: WaitFate) -> None:
        by = f" by {fate.by}" if fate.by else ""
        super().__init__(f"run {run}: {fate.wait} was decided before: {fate.decision}{by}, over {fate.door}")
        self.run = run
        self.wait = fate.wait
        self.fate = fate


class DecisionPending(TokenbusError):
    """The decision was sent, and no intake has applied it yet. Repeat it with the same id."""

    code = "decision_pending"
    retryable = True

    def __init__(self, run: str, wait: str, decision: str, waited_s: float) -> None:
        super().__init__(f"run {run}: the decision {decision} on {wait} was not applied within {waited_s:g} s")
        self.run = run
        self.wait = wait
        self.decision = decision
        self.waited_s = waited_s


class AttemptRefused(TokenbusError):
    """The attempt may write nothing more: the run ended, was cancelled, or continued with a newer attempt."""

    code = "attempt_refused"

    def __init__(self, run: str, attempt: int, reason: str) -> None:
        super().__init__(f"run {run}: attempt {attempt} was refused: {reason}")
        self.run = run
        self.attempt = attempt
        self.reason = reason


class RecordNotFound(TokenbusError):
    """The run has no debug record: it was not recorded, is still open, or its record has expired."""

    code = "record_not_found"

    def __init__(self, run: str) -> None:
        super().__init__(f"no record of run {run}; `tokenbus records` lists the available ones")
        self.run = run


class ToolFailure(TokenbusError):
    """A tool could not produce a result; the model sees ``problem`` as an error result."""

    code = "tool_failure"

    def __init__(self, tool: str, kind: str, problem: str) -> None:
        super().__init__(f"tool {tool}: {kind}: {problem}")
        self.tool = tool
        self.kind = kind
        self.problem = problem


class CursorTrimmed(TokenbusError):
    """The cursor is older than the oldest retained entry; the entries in between are lost."""

    code = "cursor_trimmed"

    def __init__(self, key: str, cursor: str, oldest: str) -> None:
        super().__init__(f"{key}: entries after {cursor} were trimmed; the oldest kept is {oldest}")
        self.key = key
        self.cursor = cursor
        self.oldest = oldest


class CursorAhead(TokenbusError):
    """The cursor is newer than the newest entry: it belongs to another run or deployment, or a failover lost entries
    that it had read. Waiting there would never return anything.
    """

    code = "cursor_ahead"

    def __init__(self, key: str, cursor: str, newest: str) -> None:
        super().__init__(f"{key}: the cursor {cursor} is past the newest entry, {newest}")
        self.key = key
        self.cursor = cursor
        self.newest = newest


class NotStorable(TokenbusError):
    """The value given to `sanitize_for_storage` is not JSON. ``where`` is a JSON Pointer to the problem."""

    code = "not_storable"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"value at {where}: {problem}")
        self.where = where
        self.problem = problem


class CircularValue(NotStorable):
    """A list or object contains itself."""

    code = "circular_value"

    def __init__(self, where: str) -> None:
        super().__init__(where, "it contains itself")


class NestedTooDeep(NotStorable):
    """Lists and objects are nested deeper than ``limit``."""

    code = "nested_too_deep"

    def __init__(self, where: str, limit: int) -> None:
        super().__init__(where, f"nested deeper than {limit}")
        self.limit = limit


class WireError(TokenbusError):
    """Bytes that cannot be decoded."""

    code = "wire_error"


class Malformed(WireError):
    """Bytes that are not the expected JSON, msgpack or event."""

    code = "malformed"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class TooLarge(WireError):
    """An event or buffer exceeds its limit; ``size`` and ``limit`` are counted in ``unit``."""

    code = "too_large"

    def __init__(self, where: str, size: int, limit: int, unit: str = "bytes", *, why: str = "") -> None:
        """``why``: what happened before, without which it would not be here."""
        super().__init__(f"{where}: {size} {unit}, the limit is {limit}{f'; {why}' if why else ''}")
        self.where = where
        self.size = size
        self.limit = limit
        self.unit = unit
        self.why = why


def undecodable(error: Exception) -> str:
    """Why a text is not the JSON that was expected, without the words of Python's own exceptions."""
    match error:
        case RecursionError():
            return "nested too deeply"
        case UnicodeError():
            return "not Unicode text"
        case _:
            return str(error)


class BlobError(TokenbusError):
    """An error of the blob store."""

    code = "blob_error"


class BlobNotFound(BlobError):
    """No blob has this id, or it has expired."""

    code = "blob_not_found"

    def __init__(self, blob_id: str) -> None:
        super().__init__(f"no blob {blob_id}")
        self.blob_id = blob_id


class BlobTooLarge(BlobError):
    """The content exceeds the store's limit, in bytes."""

    code = "blob_too_large"

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the blob has {size} bytes or more, the limit is {limit}")
        self.size = size
        self.limit = limit


class BlobRefused(BlobError):
    """The blob was not stored or not returned: bad media type or id, wrong checksum, or a truncated upload."""

    code = "blob_refused"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class BlobCorrupt(BlobError):
    """The stored bytes do not match the id, because of a faulty disk or store. Storing the blob again repairs it."""

    code = "blob_corrupt"

    def __init__(self, blob_id: str, problem: str = "the stored bytes do not match their checksum") -> None:
        super().__init__(f"{blob_id}: {problem}")
        self.blob_id = blob_id
        self.problem = problem


class BlobUnauthorized(BlobError):
    """The blob service requires a token (`TOKENBUS_BLOB_TOKEN`), or the token is wrong."""

    code = "blob_unauthorized"
    told = "the blob store refuses this deployment"

    def __init__(self, where: str) -> None:
        super().__init__(f"{where}: the blob service requires a valid token")
        self.where = where


class BlobUnavailable(BlobError):
    """The store, or the service in front of it, is unreachable or failed.

    An upload may or may not have been stored; storing the same content again is safe.
    """

    code = "blob_unavailable"
    told = "the blob store is unavailable"
    retryable = True

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class BlobStoreFull(BlobUnavailable):
    """The store has no space for the blob; nothing was stored."""

    code = "blob_store_full"
    told = "the blob store is full"


class BlobQuotaExceeded(BlobStoreFull):
    """The store has reached its configured quota; nothing was stored. Space is freed when blobs expire."""

    code = "blob_quota_exceeded"
