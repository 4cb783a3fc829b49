"""Access control of a gateway with keys: who asks, what the key allows, and whether its limits leave room."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress

import structlog

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness, rest, stop_task
from tokenbus.bus.scripts.gateway import (
    MOST_RENEWED,
    NANO,
    AdmissionLimits,
    AdmissionReply,
    HoldKeys,
    Reservation,
    RunUse,
    admit,
    count_use,
    place_of,
    release,
    renew_open,
)
from tokenbus.bus.server.retry import Defects
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server, translated
from tokenbus.errors import ServerError
from tokenbus.events.requests import Generate
from tokenbus.events.usage import Usage
from tokenbus.providers import registry
from tokenbus.providers.base import ProviderBase
from tokenbus_services.gateway.budgets.estimate import estimated_use, most_cost_nano, most_cost_of_call
from tokenbus_services.gateway.callers import AccessControl, Admitted, Caller, ForwardedCall
from tokenbus_services.gateway.keys.allowed import (
    Aliases,
    check_allowed,
    check_call_allowed,
    check_tools,
    models_of,
    rules_for,
    with_forced,
)
from tokenbus_services.gateway.keys.directory import KeyDirectory
from tokenbus_services.gateway.keys.key import KeyEntry
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.surfaces.contract import TranslationRules
from tokenbus_services.pricing import PriceTable, token_counts
from tokenbus_services.settings import Settings
from tokenbus_services.settings.tables.gateway import KeyRules

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

LEASE_S = 30.0
"""An open answer of a gateway that died counts for this long."""
RENEW_S = 10.0
HOLD_S = 900.0
"""What a budget reserves for a run that never starts, because its gateway died before it published the run, comes back
after this time. A run that starts later gets its reservation back.
"""
BEARER = "bearer "
KEY_HEADERS = ("x-api-key", "x-goog-api-key")


class KeyAccess(AccessControl):
    """Lets in who has a valid key."""

    def __init__(
        self,
        settings: Settings,
        server: Server,
        *,
        directory: KeyDirectory,
        rules: TranslationRules,
        aliases: Aliases,
        prices: PriceTable,
        keep_ms: int,
    ) -> None:
        """``rules``: what the deployment allows every client. ``keep_ms``: how long a reservation is remembered."""
        self._settings = settings
        self._server = server
        self._keys: Keys = settings.keys
        self.directory = directory
        self._rules = rules
        self._aliases = aliases
        self._prices = prices
        self._keep_ms = keep_ms
        self._name = secrets.token_hex(6)
        """Of this gateway, for its places of open answers."""
        self._open: dict[str, dict[str, int]] = {}
        """For each client with a limit of parallel requests, its open answers here by run, and how many each has."""
        self._unsure: set[tuple[str, str]] = set()
        """Client and run of admissions without a reply: each may have taken a place."""
        self._renewing: asyncio.Task[None] | None = None

    async def open(self, liveness: Liveness) -> None:
        """Begin to renew the places of open answers."""
        self._renewing = liveness.start(self._renew(), name="places of open answers")

    async def close(self) -> None:
        """Stop; open answers free their places by time."""
        await stop_task(self._renewing)

    async def identify(self, headers: Mapping[str, str]) -> Caller:
        """See `AccessControl.identify`. The answer for an unknown key and for a wrong one is the same."""
        given = key_in(headers)
        entry = await self.directory.find(given) if given else None
        if entry is None:
            raise _unauthorized()
        _check_blocked(entry.rules)
        return self._caller(entry)

    async def known(self, key: str | None) -> Caller:
        """See `AccessControl.known`."""
        entry = await self.directory.entry(key) if key else None
        if entry is None or await self.directory.valid_rules(entry.id) is None:
            raise _unauthorized()
        _check_blocked(entry.rules)
        return self._caller(entry)

    async def admit(
        self, caller: Caller, surface: str, generate: Generate, *, summary: Generate | None = None
    ) -> Admitted:
        assert generate.id is not None
        rules = await self._rules_now(caller)
        runs = [generate] if summary is None else [generate, summary]
        for run in runs:
            check_allowed(run, rules, self._aliases)
        ours = {tool.name: self._is_ours(tool.name) for tool in generate.tools}
        check_tools(generate, rules_for(rules, self._rules).tools, ours)
        if rules.max_budget is not None:
            for run in runs:
                self._check_priced(models_of(run))
        provider = self._settings.providers.get(generate.provider)
        api = registry.get(provider.api) if provider else ProviderBase
        forced = with_forced(generate, rules, takes_max_tokens=getattr(api, "takes_max_tokens", True))
        estimate = 0
        if rules.max_budget is not None:
            estimate = most_cost_nano(forced, self._prices, bus_runs_tools=any(ours.values()))
            if summary is not None and summary.messages:
                estimate += most_cost_nano(summary, self._prices, bus_runs_tools=False)
        return Admitted(generate=forced, headers=await self._enter(caller, generate.id, rules, estimate))

    async def admit_call(self, caller: Caller, call: ForwardedCall) -> Mapping[str, str]:
        rules = await self._rules_now(caller)
        check_call_allowed(call, rules, self._aliases)
        estimate = 0
        if rules.max_budget is not None and call.is_metered:
            self._check_priced([("model", call.provider, call.model)])
            estimate = most_cost_of_call(call, self._prices)
        return await self._enter(caller, call.id, rules, estimate, hold_s=call.longest_s)

    async def settle(self, caller: Caller, call: ForwardedCall, used: Usage | None) -> None:
        """See `AccessControl.settle`. Counted once, however often it is called."""
        assert caller.key is not None
        name = self._prices.name_for([f"{call.provider}/{call.model}"]) if call.model else None
        counts = token_counts(estimated_use(call, self._prices) if used is None else used, call.api)
        rules = await self.directory.rules_of(caller.key)
        settled = RunUse(
            seq=0,
            fresh=counts.fresh,
            cache_read=counts.cache_read,
            cache_write=counts.cache_write,
            output=counts.output,
            prices=self._prices.nano_per_token(name),
            price_name=name or "",
            ended=True,
        )
        script = count_use(
            self._hold_keys(caller.key, call.id),
            call.id,
            spend=self._keys.gateway_spend(caller.key),
            use=self._keys.gateway_use(caller.key),
            tokens_per_minute=(rules and rules.tpm_limit) or 0,
            used=settled,
            keep_ms=round(HOLD_S * 1000),
        )
        with translated(self._server):
            await run_script(self._server, script)

    async def withdraw(self, caller: Caller, run: str) -> None:
        # What another key of the tenant had reserved comes back to that key.
        assert caller.key is not None
        counted = self._keys.gateway_counted(run)
        with translated(self._server, counted):
            owner: bytes | None = await self._server.client.hget(counted, "client")
            key = owner.decode() if owner is not None else caller.key
            await run_script(self._server, release(self._hold_keys(key, run), run, ended=False))

    async def leave(self, caller: Caller, run: str) -> None:
        assert caller.key is not None
        runs = self._open.get(caller.key, {})
        if run not in runs:
            return
        runs[run] -= 1
        if runs[run]:
            return  # another request joined the run
        del runs[run]
        await self._free(caller.key, run)

    async def _rules_now(self, caller: Caller) -> KeyRules:
        """The rules of the caller's key. Raises Refusal (401, 403)."""
        assert caller.key is not None
        rules = await self.directory.valid_rules(caller.key)
        if rules is None:
            raise _unauthorized()
        _check_blocked(rules)
        return rules

    async def _enter(
        self, caller: Caller, run: str, rules: KeyRules, estimate_nano: int, *, hold_s: float = HOLD_S
    ) -> Mapping[str, str]:
        """Take what the limits give a run or a call. Returns headers of the answer. Raises Refusal (402, 429)."""
        assert caller.key is not None
        reply = await self._admitted(caller.key, run, rules, estimate_nano, hold_s)
        headers = headers_of(reply, rules)
        if reply.refused:
            raise _limited(reply, rules, headers)
        if rules.max_parallel_requests:
            runs = self._open.setdefault(caller.key, {})
            runs[run] = runs.get(run, 0) + 1
        return headers

    async def _free(self, key: str, run: str) -> None:
        use = self._keys.gateway_use(key)
        with translated(self._server, use):
            await self._server.client.zrem(f"{use}:open", place_of(run, self._name))

    def _caller(self, entry: KeyEntry) -> Caller:
        rules = entry.rules
        return Caller(
            rules=rules_for(rules, self._rules),
            tenant=rules.tenant or entry.id,
            key=entry.id,
            has_budget=rules.max_budget is not None,
            operator=rules.operator,
            approves=rules.approve,
            metrics=rules.metrics,
            surfaces=None if rules.surfaces is None else frozenset(rules.surfaces),
            forwards=None if rules.forward is None and rules.surfaces is None else frozenset(rules.forward or ()),
        )

    def _hold_keys(self, key: str, run: str) -> HoldKeys:
        return HoldKeys(self._keys.gateway_counted(run), self._keys.gateway_held(key))

    async def _admitted(
        self, key: str, run: str, rules: KeyRules, estimate_nano: int, hold_s: float = HOLD_S
    ) -> AdmissionReply:
        limits = AdmissionLimits(
            requests_per_minute=rules.rpm_limit or 0,
            tokens_per_minute=rules.tpm_limit or 0,
            concurrency=rules.max_parallel_requests or 0,
            budget_nano=round((rules.max_budget or 0) * NANO),
            period=rules.budget_duration or "",
        )
        reserved = Reservation(
            client=key, estimate_nano=estimate_nano, hold_ms=round(hold_s * 1000), keep_ms=self._keep_ms
        )
        call = admit(
            self._keys.gateway_use(key),
            self._keys.gateway_spend(key),
            run,
            limits,
            gateway=self._name,
            lease_ms=round(LEASE_S * 1000),
            hold=self._hold_keys(key, run),
            reserved=reserved,
        )
        try:
            with translated(self._server):
                reply = await run_script(self._server, call)
        except BaseException:
            if limits.concurrency:
                self._unsure.add((key, run))
            raise
        refused, *numbers = reply
        return AdmissionReply(refused.decode(), *(int(number) for number in numbers))

    def _is_ours(self, tool: str) -> bool:
        prefixes = self._settings.mcp_prefixes.values()
        return tool in self._settings.tools or any(tool.startswith(prefix) for prefix in prefixes)

    def _check_priced(self, choices: Iterable[tuple[str, str, str]]) -> None:
        """Raises Refusal: a budget cannot hold what has no price. ``choices``: as of `models_of`."""
        for where, provider, model in choices:
            if self._prices.name_for([f"{provider}/{model}"]) is None:
                model_name = f"{provider}/{model}"[:200]
                why = f"this key has a budget, and the setting gateway.prices has no price for the model {model_name!r}"
                raise Refusal(Problem(status=403, code="model_not_priced", message=why, kind="auth", param=where))

    async def _renew(self) -> None:
        defects = Defects()
        while True:
            await rest(RENEW_S)
            failed: Exception | None = None
            with suppress(ServerError):  # the next look, or the lease's end, frees them
                for key, run in list(self._unsure):
                    if run not in self._open.get(key, {}):
                        await self._free(key, run)
                    self._unsure.discard((key, run))
            for key, runs in list(self._open.items()):
                if not runs:
                    del self._open[key]
                    continue
                try:
                    use, lease_ms = self._keys.gateway_use(key), round(LEASE_S * 1000)
                    names = list(runs)
                    for i in range(0, len(names), MOST_RENEWED):
                        some = names[i : i + MOST_RENEWED]
                        call = renew_open(use, some, gateway=self._name, lease_ms=lease_ms)
                        with translated(self._server):
                            await run_script(self._server, call)
                except ServerError as e:
                    log.info("open_answers_not_renewed", error=str(e))
                except Exception as e:  # of one client: the places of the others are renewed all the same
                    log.exception("open_answers_not_renewed", key=key)
                    failed = e
            if failed:
                defects.count(failed)
            else:
                defects.none()


def key_in(headers: Mapping[str, str]) -> str:
    """The key of a request; empty if it has none."""
    authorization = headers.get("authorization", "")
    if authorization[: len(BEARER)].lower() == BEARER:
        return authorization[len(BEARER) :].strip(" ")
    return next((headers[name].strip(" ") for name in KEY_HEADERS if headers.get(name)), "")


def headers_of(reply: AdmissionReply, rules: KeyRules) -> dict[str, str]:
    """The limits, and what is left of them, as OpenAI's clients read it."""
    headers: dict[str, str] = {}
    levels = (
        ("requests", rules.rpm_limit, reply.requests_left, reply.requests_full_ms),
        ("tokens", rules.tpm_limit, reply.tokens_left, reply.tokens_full_ms),
    )
    for name, limit, left, full_ms in levels:
        if limit:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, left))
            headers[f"x-ratelimit-reset-{name}"] = f"{max(0, full_ms) / 1000:.3f}s"
    return headers


def _unauthorized() -> Refusal:
    why = "the API key is missing or not valid"
    return Refusal(Problem(status=401, code="invalid_api_key", message=why, kind="auth"))


def _check_blocked(rules: KeyRules) -> None:
    """Raises Refusal (403)."""
    if rules.blocked:
        raise Refusal(Problem(status=403, code="key_blocked", message="this key is blocked", kind="auth"))


def _limited(reply: AdmissionReply, rules: KeyRules, headers: Mapping[str, str]) -> Refusal:
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
            headers=headers,
        )
    )
