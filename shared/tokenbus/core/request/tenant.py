"""Whose run it is: what limits and turns go by, `metadata.tenant`."""

from __future__ import annotations

from collections.abc import Mapping

MAX_TENANT_CHARS = 128


def tenant_of(metadata: Mapping[str, object] | None) -> str:
    """The tenant that a request's metadata names, without blanks around it; empty text: none. `request_rules` sees to
    it that it is a text."""
    tenant = (metadata or {}).get("tenant")
    return tenant.strip() if isinstance(tenant, str) else ""
