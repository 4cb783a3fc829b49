"""The exception hierarchy of tokenbus.

::

    TokenbusError
    ├── RequestError              the request is at fault; resending it unchanged does not help
    │   ├── RequestInvalid        a field is missing, has the wrong type or is out of range
    │   ├── RequestTooLarge       the encoded request exceeds its limit
    │   └── PoisonRequest         several workers crashed while accepting it
    ├── ServerError               the Redis or Valkey server
    │   ├── ServerUnavailable     no answer, connection refused, or connection lost
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

One module for each family. Import the names from here.
"""

from tokenbus.errors.base import TokenbusError
from tokenbus.errors.blobs import (
    BlobCorrupt,
    BlobError,
    BlobNotFound,
    BlobQuotaExceeded,
    BlobRefused,
    BlobStoreFull,
    BlobTooLarge,
    BlobUnauthorized,
    BlobUnavailable,
)
from tokenbus.errors.deployment import (
    DeploymentMismatch,
    PublishQueueFull,
    RepartitionRefused,
    ServerError,
    ServerFull,
    ServerTooOld,
    ServerUnavailable,
    SettingsError,
)
from tokenbus.errors.requests import (
    CannotRetry,
    DeadNotFound,
    PoisonRequest,
    RequestError,
    RequestInvalid,
    RequestTooLarge,
)
from tokenbus.errors.runs import (
    AttemptRefused,
    RecordNotFound,
    RunCancelled,
    RunError,
    RunFailed,
    RunIncomplete,
    RunLost,
    RunNotFound,
    RunNotRepeatable,
    RunOpen,
    ToolFailure,
)
from tokenbus.errors.wire import (
    CircularValue,
    CursorAhead,
    CursorTrimmed,
    Malformed,
    NestedTooDeep,
    NotStorable,
    TooLarge,
    WireError,
)

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
    "RepartitionRefused",
    "RequestError",
    "RequestInvalid",
    "RequestTooLarge",
    "RunCancelled",
    "RunError",
    "RunFailed",
    "RunIncomplete",
    "RunLost",
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
