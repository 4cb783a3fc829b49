"""The caller of a request, access control between the routes and the keys, and that of a gateway without keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from hashlib import sha256
from ipaddress import ip_address

import msgspec

from tokenbus.bus.liveness import Liveness
from tokenbus.errors import SettingsError
from tokenbus.events.requests import Generate
from tokenbus.events.usage import Usage
from tokenbus.providers.api import ApiName
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.surfaces.contract import TranslationRules
from tokenbus_services.settings import Settings
from tokenbus_services.settings.tables.gateway import ForwardKind

_MARK_CHARS = 20


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """A client, as identified by its key."""

    rules: TranslationRules
    tenant: str = ""
    """Set as `metadata.tenant` of its runs. Empty: the gateway has no tenants."""
    key: str | None = None
    """Id of its key, never the key."""
    has_budget: bool = False
    operator: bool = False
    """May read topics, and the runs of every tenant."""
    approves: bool = True
    """May decide whether tool calls run that wait for it."""
    metrics: bool = False
    """May read `/metrics`."""
    surfaces: frozenset[str] | None = None
    """The surfaces that it may use; None: all."""
    forwards: frozenset[str] | None = None
    """The kinds of forwarded requests that it may use; None: all."""

    def owns(self, tenant: str) -> bool:
        """Whether it may see the runs of this tenant."""
        return self.operator or tenant == self.tenant

    def run_named(self, name: str) -> str:
        """The id of the run to which this client gives the id ``name``: that of no other tenant's run is the same.

        It has the tenant's mark, ``name@MARK``, so the tenant's runs are found by the beginning of their ids.
        """
        if not self.tenant:
            return name
        mark = f"@{sha256(self.tenant.encode()).hexdigest()[:_MARK_CHARS]}"
        return name if name.endswith(mark) else name + mark

    def may_use(self, surface: str) -> None:
        """Raises Refusal (403) if the key is not for this surface."""
        if self.surfaces is not None and surface not in self.surfaces:
            why = f"this key may not use {surface}: `surfaces` of the key lists those that it may"
            raise Refusal(Problem(status=403, code="surface_not_allowed", message=why, kind="auth"))

    def may_forward(self, kind: str) -> bool:
        """Whether the key is for this kind of forwarded requests."""
        return self.forwards is None or kind in self.forwards


class ForwardedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is no run, as limits and budgets see it."""

    id: str
    """Of its place and its reservation; unlike that of any run."""
    kind: ForwardKind
    provider: str
    model: str
    """Empty for a path that is of no model."""
    api: ApiName
    is_metered: bool
    """Whether the provider bills it by tokens."""
    longest_s: float
    """How long it may take."""
    input_tokens: int = 0
    """At most."""
    has_output: bool = False
    """Whether the provider bills an output, too."""
    seen: bool = True
    """Whether the request and its answer show what it uses. Not so for what the provider works off or stores later."""
    in_file: bool = False
    """Whether its requests are in a file, where they may name any model."""
    models: frozenset[str] = frozenset()
    """Further models of the provider that it names."""


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """A request that may be published."""

    generate: Generate
    """With the fields that the key forces."""
    headers: Mapping[str, str] = {}
    """For the answer: the limits and what is left of them."""


class AccessControl(ABC):
    """Identifies the caller, and decides whether the request may be published now."""

    async def open(self, liveness: Liveness) -> None:  # noqa: B027 (an implementation may need none of the three)
        """Called before the first request. ``liveness``: starts what works for as long as the gateway."""

    async def close(self) -> None:  # noqa: B027
        """Called after the last one."""

    @abstractmethod
    async def identify(self, headers: Mapping[str, str]) -> Caller:
        """The caller of a request with these headers (names in lower case). Raises Refusal (401)."""

    @abstractmethod
    async def known(self, key: str | None) -> Caller:
        """The caller with the key of this id, who was let in before. Raises Refusal (401, 403)."""

    @abstractmethod
    async def admit(
        self, caller: Caller, surface: str, generate: Generate, *, hold: str, summary: Generate | None = None
    ) -> Admitted:
        """Check limits and budgets; ``generate`` has its id. ``hold``: the name of what is reserved. ``summary``: a run
        of the same key that this one may begin and wait for. The reservation holds its cost too, unless it has no
        messages yet. Raises Refusal (402, 403, 429).
        """

    @abstractmethod
    async def admit_write(self, caller: Caller) -> Mapping[str, str]:
        """Check the limit of requests for a write that begins neither a run nor a call. Returns headers of the answer.
        Raises Refusal (401, 403, 429).
        """

    @abstractmethod
    async def admit_call(self, caller: Caller, call: ForwardedCall) -> Mapping[str, str]:
        """Check limits and budgets for a request that is no run. Returns headers of the answer. Raises Refusal (402,
        403, 429).
        """

    async def settle(self, caller: Caller, call: ForwardedCall, used: Usage | None) -> None:  # noqa: B027
        """Count what an admitted call used, in place of its reservation. None: it is not known, so the call counts as
        it was estimated. Called before `leave`. Raises ServerError.
        """

    async def withdraw(self, caller: Caller, hold: str) -> None:  # noqa: B027
        """The admitted request was not published. ``hold``: the name, or what it was made for. Also called before
        `leave`.
        """

    async def leave(self, caller: Caller, run: str) -> None:  # noqa: B027
        """The answer to an admitted request or call has ended, in any way. Called once for each admission."""


class OpenAccess(AccessControl):
    """Lets everybody in. Only for a gateway that listens on loopback."""

    def __init__(self, rules: TranslationRules) -> None:
        self._caller = Caller(rules=rules, operator=True)

    async def identify(self, headers: Mapping[str, str]) -> Caller:
        return self._caller

    async def known(self, key: str | None) -> Caller:
        return self._caller

    async def admit(
        self, caller: Caller, surface: str, generate: Generate, *, hold: str, summary: Generate | None = None
    ) -> Admitted:
        return Admitted(generate=generate)

    async def admit_write(self, caller: Caller) -> Mapping[str, str]:
        return {}

    async def admit_call(self, caller: Caller, call: ForwardedCall) -> Mapping[str, str]:
        return {}


def has_keys(settings: Settings) -> bool:
    """Whether clients need a key."""
    table = settings.gateway
    return table is not None and (table.require_keys or bool(table.keys) or table.admin is not None)


def check_exposed(settings: Settings, address: str) -> None:
    """Raise SettingsError if a gateway without keys would listen on a non-loopback address."""
    if not has_keys(settings) and not ip_address(address.partition("%")[0]).is_loopback:
        problem = f"no keys are configured, so the gateway may listen only on loopback, not on {address}"
        raise SettingsError("settings", "gateway.keys", problem)
