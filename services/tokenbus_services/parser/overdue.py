"""Decides what is overdue in an open run. Pure: a function of the run's state and the time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from tokenbus.core.run.state import PendingCall, RunState
from tokenbus_services.settings import DEFAULT_TOOL_TIMEOUT_S, Settings


class PolicyStageStatus(msgspec.Struct, frozen=True):
    """The state of the policy stage in one partition."""

    alive_ms: int
    """Unix time when a worker was last seen to own the partition; 0: never."""
    alive: bool
    """Whether a worker owns it now."""
    lag_bytes: int
    """Bytes of drafts that it has not read."""
    read_ms: int
    """When the last draft that it has read was written."""


MAX_LOSSES = 5
"""How often a stage may be lost without reading anything before it counts as unavailable."""


class PolicyStageObserver:
    """Observes the policy stage in one partition, look by look."""

    def __init__(self) -> None:
        self._alive_ms: int | None = None
        self._read = ""
        self._was_alive = False
        self._losses = 0

    def observe(self, *, alive: bool, lag_bytes: int, read: str, read_ms: int, now_ms: int) -> PolicyStageStatus:
        """Record an observation: whether a worker owns it, and the last entry read, with the time of that draft.

        A stage that is lost repeatedly without reading anything counts as unavailable: its workers do not restart the
        timeout.
        """
        if read != self._read or lag_bytes == 0:
            self._read, self._losses = read, 0
        if self._was_alive and not alive:
            self._losses += 1
        self._was_alive = alive
        # If it is unavailable at the first look, it existed before; when it was lost is unknown, so assume now.
        if (alive and self._losses < MAX_LOSSES) or (self._alive_ms is None and read != "0-0"):
            self._alive_ms = now_ms
        return PolicyStageStatus(self._alive_ms or 0, alive, lag_bytes, read_ms)


class Timeouts(msgspec.Struct, frozen=True):
    """The parser's timeouts."""

    tools_s: Mapping[str, float | None]
    """By tool: its own timeout."""
    prefixes_s: Mapping[str, float | None]
    """By name prefix of an MCP server's tools."""
    slack_s: float
    silent_s: float
    lag_bytes: int
    """Above this lag, attempts of runs under policies are held back."""

    @classmethod
    def of(cls, settings: Settings) -> Timeouts:
        """Read the timeouts from the deployment's settings."""
        prefixes = settings.mcp_prefixes
        return cls(
            tools_s={name: tool.timeout_s for name, tool in settings.tools.items()},
            prefixes_s={prefixes[name]: server.timeout_s for name, server in settings.mcp.items()},
            slack_s=settings.limits.tool_slack_s,
            silent_s=settings.limits.silent_run_s,
            lag_bytes=settings.limits.lag_bytes,
        )

    def deadline_passed(self, s: RunState, now_ms: int) -> bool:
        """Whether the run's deadline has passed."""
        return 0 < s.accepted.deadline_ms <= now_ms

    def overdue_calls(self, s: RunState, now_ms: int, *, stood_until_ms: int = 0) -> Iterator[PendingCall]:
        """Yield calls whose tool would have returned by now if it had run.

        ``stood_until_ms``, here and below: when the parser last continued after it stood. It had read nothing until
        then, so what it waits for has all its time from there on.
        """
        if s.phase == "tools":
            for pending in s.calls:
                allowed_s = self._tool_s(pending.runs.name, s.accepted.tool_timeout_s) + self.slack_s
                if pending.result is None and now_ms - max(s.seen_ms, stood_until_ms) > allowed_s * 1000:
                    yield pending

    def policies_overdue(self, s: RunState, now_ms: int, stage: PolicyStageStatus, *, stood_until_ms: int = 0) -> bool:
        """Whether the run's policies would have decided by now if any worker were running them.

        A slow stage is not an absent one: drafts that it has not read are waiting their turn. If the stage is
        unavailable, a run whose attempt is held back by other runs' drafts waits no longer than a run with drafts of
        its own.
        """
        gate, policy_plan = s.gate, s.accepted.policy_plan
        if gate is None or policy_plan is None or gate.bypassed:
            return False
        if gate.idle and (stage.alive or s.phase != "streaming" or stage.lag_bytes <= self.lag_bytes // 2):
            return False
        since_ms = max(gate.since_ms, s.seen_ms, s.accepted_ms) if gate.idle else gate.since_ms
        since_ms = max(since_ms, stood_until_ms)
        if not stage.alive:
            now_ms -= max(0, stage.alive_ms - since_ms)
        elif stage.lag_bytes > 0:
            now_ms = min(now_ms, stage.read_ms)
        return now_ms - since_ms > policy_plan.patience_ms

    def is_silent(self, s: RunState, now_ms: int, *, stood_until_ms: int = 0) -> bool:
        """Whether the run had no event for so long that its work may be lost."""
        return now_ms - max(s.seen_ms, s.accepted_ms, stood_until_ms) > self.silent_s * 1000

    def _tool_s(self, name: str, requested_s: float | None) -> float:
        own_s = self.tools_s.get(name)
        for prefix, timeout_s in self.prefixes_s.items():
            if name not in self.tools_s and name.startswith(prefix):
                own_s = timeout_s
        return min((s for s in (requested_s, own_s) if s is not None), default=DEFAULT_TOOL_TIMEOUT_S)
