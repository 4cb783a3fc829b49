"""What of an open run should have come long ago: pure, a function of its state and of the time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from tokenbus.core.state import PendingCall, RunState
from tokenbus_services.settings import DEFAULT_TOOL_TIMEOUT_S, Settings


class Patience(msgspec.Struct, frozen=True):
    """How long the parser waits."""

    tools_s: Mapping[str, float | None]
    """By tool: its own timeout."""
    prefixes_s: Mapping[str, float | None]
    """By what the names of an MCP server's tools begin with."""
    providers_s: Mapping[str, float]
    """By provider: the longest silence that its own timeouts allow."""
    slack_s: float
    silent_s: float

    @classmethod
    def of(cls, settings: Settings) -> Patience:
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

    def unjudged(self, s: RunState, now_ms: int) -> bool:
        """Whether the run's policies must have said something by now, if any worker had them."""
        gate, policing = s.gate, s.accepted.policing
        return bool(gate and policing and not gate.idle and now_ms - gate.since_ms > policing.patience_ms)

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
