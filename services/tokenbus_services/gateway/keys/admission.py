"""Whether a client's key lets a run begin: its models, its limits and its budget. Every run of a key passes here, those
that clients ask for and those that tool calls begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.gateway import (
    NANO,
    AdmissionLimits,
    AdmissionReply,
    HoldKeys,
    Reservation,
    admit,
    release,
)
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server, translated
from tokenbus.events.child_runs import parent_call
from tokenbus.events.requests import Generate
from tokenbus.providers import registry
from tokenbus.providers.base import ProviderBase
from tokenbus_services.gateway.budgets.estimate import most_cost_nano
from tokenbus_services.gateway.budgets.holds import hold_of, note_newest
from tokenbus_services.gateway.keys.allowed import Aliases, check_allowed, models_of, with_forced
from tokenbus_services.gateway.keys.directory import KeyDirectory
from tokenbus_services.gateway.keys.store import KeyStore
from tokenbus_services.gateway.models import aliases_of
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.surfaces.contract import Payer
from tokenbus_services.pricing import PriceTable
from tokenbus_services.settings import GatewaySettings, Settings
from tokenbus_services.settings.tables.gateway import KeyRules

LEASE_S = 30.0
"""An open answer of a gateway that died counts for this long."""
HOLD_S = 900.0
"""What a budget reserves for a run that never starts, because its gateway died before it published the run, comes back
after this time. A run that starts later gets its reservation back.
"""
COUNTED_KEPT_MS = 2 * 3_600_000


class KeyAdmission:
    """Admits runs of keys."""

    def __init__(
        self,
        settings: Settings,
        server: Server,
        *,
        directory: KeyDirectory,
        aliases: Aliases,
        prices: PriceTable,
        keep_ms: int,
    ) -> None:
        """``keep_ms``: how long a reservation is remembered."""
        self._settings = settings
        self._server = server
        self._keys: Keys = settings.keys
        self.directory = directory
        self.aliases = aliases
        self.prices = prices
        self.keep_ms = keep_ms

    @classmethod
    def of(cls, settings: Settings, server: Server) -> KeyAdmission:
        """That of a deployment."""
        table = settings.gateway or GatewaySettings()
        # Events come again until the group has acknowledged them, at the latest when a gateway is back; a run may be
        # open for as long as its keys are kept.
        open_s = settings.retention.open_run_s + settings.retention.finished_run_s
        return cls(
            settings,
            server,
            directory=KeyDirectory(table.keys, KeyStore(server, settings.keys)),
            aliases=aliases_of(table),
            prices=PriceTable(table.prices),
            keep_ms=COUNTED_KEPT_MS + round(1000 * open_s),
        )

    async def admit_child(self, request: Generate, payer: Payer) -> Generate:
        """Admit a child run, for which this key pays; returns its request with the fields that the key forces. The same
        run again is admitted again, and takes nothing more.

        Its reservation is in addition to those of the runs above it, which leave it room. It has no place among the
        open answers, for nobody outside reads it. Raises Refusal (401, 402, 403, 429), ServerError.
        """
        assert request.id is not None
        rules = await self.rules_now(payer.key)
        self.check([request], rules)
        forced = msgspec.structs.replace(self.forced(request, rules), webhooks=request.webhooks)
        above = [] if payer.hold is None else [payer.hold]
        found = parent_call(request.id)
        while found:
            above.append(hold_of(found[0], payer))
            found = parent_call(found[0])
        without_places = msgspec.structs.replace(rules, max_parallel_requests=None)
        reply = await self.ask(
            payer.key,
            request.id,
            without_places,
            self.estimate(forced, rules),
            hold=hold_of(request.id, payer),
            gateway="",
            above=list(dict.fromkeys(above)),  # each once: what is held for the root is in the note and has its name
        )
        if reply.refused:
            raise limited(reply, rules)
        return forced

    async def rules_now(self, key: str) -> KeyRules:
        """The rules of the key with this id. Raises Refusal (401, 403)."""
        rules = await self.directory.valid_rules(key)
        if rules is None:
            raise unauthorized()
        check_blocked(rules)
        return rules

    def check(self, requests: Sequence[Generate], rules: KeyRules) -> None:
        """Raise Refusal (403) for what the key does not allow, or what its budget cannot hold."""
        for request in requests:
            check_allowed(request, rules, self.aliases)
        if rules.max_budget is not None:
            for request in requests:
                self.check_priced(models_of(request))

    def check_priced(self, choices: Iterable[tuple[str, str, str]]) -> None:
        """Raises Refusal: a budget cannot hold what has no price. ``choices``: as of `models_of`."""
        for where, provider, model in choices:
            if self.prices.name_for([f"{provider}/{model}"]) is None:
                model_name = f"{provider}/{model}"[:200]
                why = f"this key has a budget, and the setting gateway.prices has no price for the model {model_name!r}"
                raise Refusal(Problem(status=403, code="model_not_priced", message=why, kind="auth", param=where))

    def forced(self, request: Generate, rules: KeyRules) -> Generate:
        """The request with the fields that the key forces."""
        provider = self._settings.providers.get(request.provider)
        api = registry.get(provider.api) if provider else ProviderBase
        return with_forced(request, rules, takes_max_tokens=getattr(api, "takes_max_tokens", True))

    def estimate(self, request: Generate, rules: KeyRules) -> int:
        """What the request may cost, in billionths of the currency; 0 for a key without a budget."""
        if rules.max_budget is None:
            return 0
        runs_tools = any(self.is_ours(tool.name) for tool in request.tools)
        return most_cost_nano(request, self.prices, bus_runs_tools=runs_tools)

    def is_ours(self, tool: str) -> bool:
        """Whether the deployment has this tool."""
        prefixes = self._settings.mcp_prefixes.values()
        return tool in self._settings.tools or any(tool.startswith(prefix) for prefix in prefixes)

    async def ask(
        self,
        key: str,
        run: str,
        rules: KeyRules,
        estimate_nano: int,
        *,
        hold: str,
        gateway: str,
        hold_s: float = HOLD_S,
        above: Sequence[str] = (),
    ) -> AdmissionReply:
        """Take what the limits give a run or a call, if they give it. ``hold``: the name of what its budget reserves.
        ``above``: see `admit`. Raises ServerError.
        """
        limits = AdmissionLimits(
            requests_per_minute=rules.rpm_limit or 0,
            tokens_per_minute=rules.tpm_limit or 0,
            concurrency=rules.max_parallel_requests or 0,
            budget_nano=round((rules.max_budget or 0) * NANO),
            period=rules.budget_duration or "",
        )
        reserved = Reservation(
            client=key, estimate_nano=estimate_nano, hold_ms=round(hold_s * 1000), keep_ms=self.keep_ms
        )
        call = admit(
            self._keys.gateway_use(key),
            self._keys.gateway_spend(key),
            run,
            limits,
            gateway=gateway,
            lease_ms=round(LEASE_S * 1000),
            hold=self.hold_keys(key, hold),
            held_as=hold,
            reserved=reserved,
            above=above,
        )
        with translated(self._server):
            refused, *numbers = await run_script(self._server, call)
            if estimate_nano and hold != run and not refused:
                await note_newest(self._server, self._keys, run, hold, key, kept_ms=round(hold_s * 1000))
        return AdmissionReply(refused.decode(), *(int(number) for number in numbers))

    async def release(self, key: str, hold: str) -> None:
        """Reserve nothing under this name for a run that was not published. Raises ServerError."""
        with translated(self._server):
            await run_script(self._server, release(self.hold_keys(key, hold), hold, ended=False))

    def hold_keys(self, key: str, hold: str) -> HoldKeys:
        return HoldKeys(self._keys.gateway_counted(hold), self._keys.gateway_held(key))


def unauthorized() -> Refusal:
    why = "the API key is missing or not valid"
    return Refusal(Problem(status=401, code="invalid_api_key", message=why, kind="auth"))


def check_blocked(rules: KeyRules) -> None:
    """Raises Refusal (403)."""
    if rules.blocked:
        raise Refusal(Problem(status=403, code="key_blocked", message="this key is blocked", kind="auth"))


def limited(reply: AdmissionReply, rules: KeyRules, headers: Mapping[str, str] | None = None) -> Refusal:
    """The refusal that the reply means (402, 429)."""
    wait_s = max(0.001, reply.retry_ms / 1000)
    if reply.refused == "budget":
        period = f"per {rules.budget_duration}" if rules.budget_duration else "in all"
        why = f"the budget of this key is spent ({rules.max_budget:g} {period})"
        return Refusal(Problem(status=402, code="budget_exceeded", message=why, kind="limit"))
    if reply.refused == "reserved":
        why = "what is left of this key's budget is reserved for its open runs"
        code = "budget_reserved"
    elif reply.refused == "concurrency":
        why = f"this key has {rules.max_parallel_requests} answers in progress already, its most"
        code = "too_many_runs"
    else:
        limit = rules.rpm_limit if reply.refused == "requests" else rules.tpm_limit
        why = f"this key's limit of {limit} {reply.refused} per minute is reached"
        code = "rate_limit_exceeded"
    return Refusal(
        Problem(
            status=429,
            code=code,
            message=why,
            kind="rate_limit",
            retry_after_s=wait_s,
            should_retry=True,
            headers=headers or {},
        )
    )
