"""Decides a run's policies when it is accepted, so that replays and other workers use the same ones."""

from __future__ import annotations

from tokenbus.core.request.fallback_request import all_choices
from tokenbus.errors import RequestInvalid
from tokenbus.events.frames import PolicyPlan
from tokenbus.events.requests import Generate
from tokenbus_services.intake.settings_match import on_route
from tokenbus_services.settings import Settings


class PolicyRoutes:
    """The deployment's policies and routes."""

    def __init__(self, settings: Settings) -> None:
        self._policies = settings.policies
        self._routes = settings.policy_routes
        self._slack_s = settings.limits.policy_slack_s

    def plan_for(self, request: Generate) -> PolicyPlan | None:
        """Return the policies of all routes that match the request, then those it names itself, without duplicates.

        A request cannot remove a routed policy. Routes of its fallbacks count too, whichever provider answers in the
        end, because released output cannot be taken back. None if there are no policies. Raises RequestInvalid for a
        name that is not configured.
        """
        for i, name in enumerate(request.policies):
            if name not in self._policies:
                raise RequestInvalid(f"policies[{i}]", f"there is no policy {name!r} here")
        choices = all_choices(request)
        routed = [name for route in self._routes if any(on_route(a, route) for a in choices) for name in route.policies]
        names = tuple(dict.fromkeys([*routed, *request.policies]))
        if not names:
            return None
        policies = [self._policies[name] for name in names]
        patience_s = sum(policy.timeout_s for policy in policies) + self._slack_s
        passes = all(policy.on_error == "pass" for policy in policies)
        return PolicyPlan(names, "pass" if passes else "block", round(patience_s * 1000))
