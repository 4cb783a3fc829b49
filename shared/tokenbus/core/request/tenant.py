"""Tenant of a run, `metadata.tenant`: limits and fair queueing apply per tenant."""

from __future__ import annotations

from collections.abc import Mapping

MAX_TENANT_CHARS = 128


def tenant_of(metadata: Mapping[str, object] | None) -> str:
    """The tenant in a request's metadata, stripped; empty if there is none. `check_request` ensures that it is text."""
    tenant = (metadata or {}).get("tenant")
    return tenant.strip() if isinstance(tenant, str) else ""
