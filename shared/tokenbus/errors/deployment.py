"""The Redis or Valkey server, the settings, and what all processes of a deployment must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tokenbus.errors.base import TokenbusError

if TYPE_CHECKING:
    from tokenbus.events.requests import Generate


class ServerError(TokenbusError):
    """An error of the Redis or Valkey server."""

    code = "server_error"
    told = "the bus cannot take requests now"
    request: Generate | Mapping[str, object] | None = None
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
