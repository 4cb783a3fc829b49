"""The groups of workers that a deployment has, and the streams that they read."""

from __future__ import annotations

from typing import Final

from tokenbus.bus.keys import InternalTopic

STAGES: Final[tuple[tuple[str, InternalTopic], ...]] = (("normalizer", "raw"), ("parser", "events"))
"""The ordered stages, each with its input."""
POLICY: Final[tuple[str, InternalTopic]] = ("policy", "drafts")
"""A further stage, if runs have policies."""
QUEUES: Final[tuple[tuple[str, InternalTopic], ...]] = (("fetcher", "turns"), ("tools", "tools"))
"""The groups of work queues with one stream a partition."""
RECORDER: Final[tuple[str, InternalTopic]] = ("recorder", "records")
"""A further queue, if runs are recorded."""
INTAKE: Final = "intake"
"""The group that reads the inbound stream."""
GROUPS: Final = (INTAKE, *(name for name, _ in (*STAGES, POLICY, *QUEUES, RECORDER)))
CHAINED: Final = ("fetcher", "normalizer", "parser")
"""The groups of which a pipeline worker is a member under one name."""
ALIVE_MS: Final = 10_000
"""A worker without a heartbeat for this long is gone. It writes one at least once a second; if it only slept, it reads
the deployment's number of partitions before it continues."""
