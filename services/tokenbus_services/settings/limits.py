"""Limits: rates at the providers, and the bound of everything else."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tokenbus_services.settings.types import Bytes, Count, Seconds, Table


class RateSettings(Table, frozen=True, kw_only=True):
    """What all fetchers together may do in one scope; None: no limit. See docs/guides/limits.md."""

    requests_per_second: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    """A second's worth, and at least one request, may come at once."""
    tokens_per_minute: Annotated[int, Meta(ge=1, le=10**12)] | None = None
    """Input and output. A minute's worth may come at once."""
    concurrency: Count | None = None
    """Calls at once."""


class ProviderRates(RateSettings, frozen=True, kw_only=True):
    """The limits of one provider, and of its models."""

    models: dict[str, RateSettings] = {}
    """By name, or by a beginning of names and `*` after it (`gpt-5*`), whose models share one limit. The name itself
    comes first, then the longest beginning."""


class LimitSettings(Table, frozen=True, kw_only=True):
    """Bounds; each has a named error."""

    request_bytes: Bytes = 4 * 2**20
    inbound_entries: Count = 100_000
    answer_bytes: Bytes = 256 * 2**20
    """Of one answer of a provider, decoded; images in it count as base64."""
    block_bytes: Bytes = 16 * 2**20
    run_events: Count = 500_000
    turn_bytes: Bytes = 64 * 2**20
    """What the attempts of one turn say, as events; beyond it the run fails with `turn_too_large`. The parser keeps a
    turn in memory."""
    run_bytes: Bytes = 256 * 2**20
    """The same of a whole run, tool results and what its policies rule included: `run_too_large`."""
    runs_per_fetcher: Count = 512
    waiting_per_fetcher: Count = 1024
    """Runs that a fetcher looks at beyond those, so that each tenant gets its turn. One tenant never fills it."""
    longest_wait_s: Seconds = 3600.0
    """So long a run waits for its turn; then it fails with `limit_wait`. A request's `deadline_s` may be shorter."""
    providers: dict[str, ProviderRates] = {}
    """By the provider's name. With a table, even an empty one, a provider's Retry-After holds for all fetchers."""
    tenant: RateSettings | None = None
    """Of each tenant (`metadata.tenant`) that has no table of its own. Runs without a tenant are together one."""
    tenants: dict[str, RateSettings] = {}
    """By the tenant's name; empty text: runs without one."""
    tool_calls_per_worker: Count = 64
    tool_slack_s: Seconds = 120.0
    """So long past its timeout a call may stay open: it may have waited for an executor, or have been given to a second
    one. Then it gets an error result."""
    silent_run_s: Seconds = 900.0
    """A run of which nothing was heard for so long, and which no fetcher has, was lost, and ends `incomplete`."""
    tool_result_bytes: Bytes = 64 * 2**10
    """A larger result goes to the blob store; the model and the bus see its beginning and the blob's id."""
    tool_image_bytes: Annotated[int, Meta(ge=0)] = 2**20
    """Bytes of images in one result that the model is shown; further ones it reads of."""
    mcp_message_bytes: Bytes = 8 * 2**20
    """One message of an MCP server."""
    policy_slack_s: Seconds = 30.0
    """So long past the timeouts of all its policies a run may wait for a policy worker: one may have to start anew."""
    policy_calls_per_worker: Count = 64
    """Calls of policies that run at once in one worker, the works that they put off among them; the runs take turns."""
    policy_waiting_events: Count = 50_000
    """Events that wait in one policy worker's hands: with more it reads no further for a while."""
    lag_bytes: Bytes = 8 * 2**20
    """Per partition and hop: a fetcher stops reading sockets while a later stage is this far behind; those of
    runs that have policies also while the policy stage is."""
