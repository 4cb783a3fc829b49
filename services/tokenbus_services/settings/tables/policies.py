"""Policies, and the runs they apply to."""

from __future__ import annotations

from typing import Literal

from tokenbus_services.settings.types import ImportPath, Seconds, Table


class PolicySettings(Table, frozen=True, kw_only=True):
    """A policy that can apply to runs. See docs/guides/policy-stage.md."""

    use: ImportPath
    """`module:Class`, a `tokenbus.policy` StreamProcessor, or `module:function`. The module may be in the directory of
    the settings file."""
    options: dict[str, object] = {}
    """Options declared by the class."""
    on_error: Literal["block", "pass"] = "block"
    """What happens to a run if its policy fails: it ends, or continues without the policy."""
    timeout_s: Seconds = 30.0
    """Timeout of each policy call."""


class PolicyRoute(Table, frozen=True, kw_only=True):
    """Which runs have policies. Criteria left out match every run. A run that matches several routes gets the policies
    of all, in this order.
    """

    policies: tuple[str, ...]
    """Names from `[policies.NAME]`, in the order in which they judge."""
    providers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    """Exact names, or prefixes followed by `*` (`gpt-5*`)."""
    tenants: tuple[str, ...] = ()
    """Values of `metadata.tenant`."""
    metadata: dict[str, str] = {}
    """Text values that the run's metadata must contain."""
