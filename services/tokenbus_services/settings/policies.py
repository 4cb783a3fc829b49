"""Policies, and which runs have them."""

from __future__ import annotations

from typing import Literal

from tokenbus_services.settings.types import ImportPath, Seconds, Table


class PolicySettings(Table, frozen=True, kw_only=True):
    """One policy that a run may have. See docs/guides/policy-stage.md."""

    use: ImportPath
    """Its class, `module:Class`: a `tokenbus.policy` StreamProcessor."""
    options: dict[str, object] = {}
    """As the class declares them."""
    on_error: Literal["block", "pass"] = "block"
    """What becomes of a run whose policy fails: it ends, or it goes on without."""
    timeout_s: Seconds = 30.0
    """Of each call of the policy."""


class PolicyRoute(Table, frozen=True, kw_only=True):
    """Which runs have policies. What is left out, any run meets; one that meets several routes has the policies of all,
    in this order."""

    policies: tuple[str, ...]
    """Names of `[policies.NAME]`, in the order in which they judge."""
    providers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    """These, or those with a beginning and `*` after it (`gpt-5*`)."""
    tenants: tuple[str, ...] = ()
    """Of `metadata.tenant`."""
    metadata: dict[str, str] = {}
    """Texts that the run's metadata must have."""
