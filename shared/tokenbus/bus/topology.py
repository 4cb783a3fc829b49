"""The groups of workers that a deployment has, and the streams that they read."""

from __future__ import annotations

from typing import Final, TypeAlias

from tokenbus.bus.keys import InternalTopic

Queue: TypeAlias = tuple[str, InternalTopic]
"""A group of workers, and the topic that it reads."""
STAGES: Final[tuple[Queue, ...]] = (("normalizer", "raw"), ("parser", "events"))
"""The ordered stages, each with its input."""
POLICY: Final[Queue] = ("policy", "drafts")
"""A further stage, if runs have policies."""
QUEUES: Final[tuple[Queue, ...]] = (("fetcher", "turns"), ("tools", "tools"))
"""The groups of work queues with one stream a partition."""
RECORDER: Final[Queue] = ("recorder", "records")
"""A further queue, if runs are recorded."""
WEBHOOKS: Final[Queue] = ("webhooks", "notices")
"""The further queue of a deployment with webhooks."""
INTAKE: Final = "intake"
"""The group that reads the inbound stream."""
GROUPS: Final = (INTAKE, *(name for name, _ in (*STAGES, POLICY, *QUEUES, RECORDER, WEBHOOKS)))
CHAINED: Final = ("fetcher", "normalizer", "parser")
"""The groups of which a pipeline worker is a member under one name."""
ALIVE_MS: Final = 10_000
"""A worker without a heartbeat for this long is gone. It writes one at least once a second; if it only slept, it reads
the deployment's number of partitions before it continues."""
