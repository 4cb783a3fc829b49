"""What of an open run should have come long ago: pure, a function of its state and of the time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from tokenbus.core.run.state import PendingCall, RunState
from tokenbus_services.settings import DEFAULT_TOOL_TIMEOUT_S, Settings


class PolicyTimeouts(msgspec.Struct, frozen=True):
    """The policy stage in one partition."""

    alive_ms: int
    """Unix time at which a worker was last seen to have it; 0: never."""
    alive: bool
    """Whether one has it now."""
    lag_bytes: int
    """Drafts that it has not read."""
    read_ms: int
    """When the last one that it has read was drafted."""


MOST_LOSSES = 5
"""So often a stage may be lost before it has read anything more, and be given time to come back."""


class JudgesSeen:
    """The policy stage in one partition, look by look."""

    def __init__(self) -> None:
        self._alive_ms: int | None = None
        self._read = ""
        self._here = False
        self._losses = 0

    def look(self, *, alive: bool, lag_bytes: int, read: str, read_ms: int, now_ms: int) -> PolicyTimeouts:
        """Whether a worker has it now, and the last entry that any has read, which was drafted then.

        A stage that is lost again and again and reads nothing in between is as good as away: patience does not begin
        anew with each of its workers.
        """
        if read != self._read or lag_bytes == 0:
            self._read, self._losses = read, 0
        if self._here and not alive:
            self._losses += 1
        self._here = alive
        # One that is away at the first look was there once. When it was lost was not seen: then it was just now.
        if (alive and self._losses < MOST_LOSSES) or (self._alive_ms is None and read != "0-0"):
            self._alive_ms = now_ms
        return PolicyTimeouts(self._alive_ms or 0, alive, lag_bytes, read_ms)


class Timeouts(msgspec.Struct, frozen=True):
    """How long the parser waits."""

    tools_s: Mapping[str, float | None]
    """By tool: its own timeout."""
    prefixes_s: Mapping[str, float | None]
    """By what the names of an MCP server's tools begin with."""
    providers_s: Mapping[str, float]
    """By provider: the longest silence that its own timeouts allow."""
    slack_s: float
    silent_s: float
    lag_bytes: int
    """With more drafts unread, attempts of runs that have policies are held back."""

    @classmethod
    def of(cls, settings: Settings) -> Timeouts:
        """As the deployment's settings have it."""
        prefixes = settings.mcp_prefixes
        return cls(
            tools_s={name: tool.timeout_s for name, tool in settings.tools.items()},
            prefixes_s={prefixes[name]: server.timeout_s for name, server in settings.mcp.items()},
            providers_s={
                name: p.connect_timeout_s + p.first_event_timeout_s + p.idle_timeout_s
                for name, p in settings.providers.items()
            },
            slack_s=settings.limits.tool_slack_s,
            silent_s=settings.limits.silent_run_s,
            lag_bytes=settings.limits.lag_bytes,
        )

    def deadline_passed(self, s: RunState, now_ms: int) -> bool:
        """Whether the run's time is over."""
        return 0 < s.accepted.deadline_ms <= now_ms

    def vanished_calls(self, s: RunState, now_ms: int) -> Iterator[PendingCall]:
        """Calls whose tool must have given a result by now, if anybody ran it."""
        if s.phase == "tools":
            for pending in s.calls:
                allowed_s = self._tool_s(pending.runs.name, s.accepted.tool_timeout_s) + self.slack_s
                if pending.result is None and now_ms - s.seen_ms > allowed_s * 1000:
                    yield pending

    def unjudged(self, s: RunState, now_ms: int, judges: PolicyTimeouts) -> bool:
        """Whether the run's policies must have said something by now, if any worker had them.

        A stage that is slow is not one that is away: what it has not read yet waits for its turn. Of a stage that is
        away, a run whose attempt is held back for others' drafts waits no longer than one that has drafts of its own.
        """
        gate, policing = s.gate, s.accepted.policing
        if gate is None or policing is None or gate.passing:
            return False
        if gate.idle and (judges.alive or s.phase != "streaming" or judges.lag_bytes <= self.lag_bytes // 2):
            return False
        since_ms = max(gate.since_ms, s.seen_ms, s.accepted_ms) if gate.idle else gate.since_ms
        if not judges.alive:
            now_ms -= max(0, judges.alive_ms - since_ms)
        elif judges.lag_bytes > 0:
            now_ms = min(now_ms, judges.read_ms)
        return now_ms - since_ms > policing.patience_ms

    def silent(self, s: RunState, now_ms: int) -> bool:
        """Whether a provider should have been heard by now, if anybody called it."""
        allowed_s = max(self.silent_s, self.providers_s.get(s.accepted.provider, 0))
        return s.phase == "streaming" and now_ms - max(s.seen_ms, s.accepted_ms) > allowed_s * 1000

    def _tool_s(self, name: str, asked_s: float | None) -> float:
        own_s = self.tools_s.get(name)
        for prefix, timeout_s in self.prefixes_s.items():
            if name not in self.tools_s and name.startswith(prefix):
                own_s = timeout_s
        return min((s for s in (asked_s, own_s) if s is not None), default=DEFAULT_TOOL_TIMEOUT_S)
