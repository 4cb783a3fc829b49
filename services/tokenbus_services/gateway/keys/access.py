"""Access control of a gateway with keys: who asks, what the key allows, and whether its limits leave room."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import suppress

import structlog

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness, rest, stop_task
from tokenbus.bus.scripts.gateway import (
    MOST_RENEWED,
    AdmissionReply,
    RunUse,
    count_use,
    place_of,
    renew_open,
)
from tokenbus.bus.server.retry import Defects
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server, translated
from tokenbus.errors import ServerError
from tokenbus.events.requests import Generate
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.budgets.estimate import estimated_use, most_cost_of_call
from tokenbus_services.gateway.budgets.holds import newest_hold
from tokenbus_services.gateway.callers import AccessControl, Admitted, Caller, ForwardedCall
from tokenbus_services.gateway.keys.admission import (
    HOLD_S,
    LEASE_S,
    KeyAdmission,
    check_blocked,
    limited,
    unauthorized,
)
from tokenbus_services.gateway.keys.allowed import (
    check_call_allowed,
    check_tools,
    rules_for,
)
from tokenbus_services.gateway.keys.directory import KeyDirectory
from tokenbus_services.gateway.keys.key import KeyEntry
from tokenbus_services.gateway.surfaces.contract import TranslationRules
from tokenbus_services.pricing import token_counts
from tokenbus_services.settings import Settings
from tokenbus_services.settings.tables.gateway import KeyRules

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

RENEW_S = 10.0
BEARER = "bearer "
KEY_HEADERS = ("x-api-key", "x-goog-api-key")


class KeyAccess(AccessControl):
    """Lets in who has a valid key."""

    def __init__(
        self,
        settings: Settings,
        server: Server,
        *,
        admission: KeyAdmission,
        rules: TranslationRules,
    ) -> None:
        """``rules``: what the deployment allows every client."""
        self._server = server
        self._keys: Keys = settings.keys
        self._admission = admission
        self._rules = rules
        self._name = secrets.token_hex(6)
        """Of this gateway, for its places of open answers."""
        self._open: dict[str, dict[str, int]] = {}
        """For each client with a limit of parallel requests, its open answers here by run, and how many each has."""
        self._unsure: set[tuple[str, str]] = set()
        """Client and run of admissions without a reply: each may have taken a place."""
        self._renewing: asyncio.Task[None] | None = None

    @property
    def directory(self) -> KeyDirectory:
        return self._admission.directory

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
            raise unauthorized()
        check_blocked(entry.rules)
        return self._caller(entry)

    async def known(self, key: str | None) -> Caller:
        """See `AccessControl.known`."""
        entry = await self.directory.entry(key) if key else None
        if entry is None or await self.directory.valid_rules(entry.id) is None:
            raise unauthorized()
        check_blocked(entry.rules)
        return self._caller(entry)

    async def admit(
        self, caller: Caller, surface: str, generate: Generate, *, hold: str, summary: Generate | None = None
    ) -> Admitted:
        assert generate.id is not None
        assert caller.key is not None
        admission = self._admission
        rules = await admission.rules_now(caller.key)
        admission.check([generate] if summary is None else [generate, summary], rules)
        ours = {tool.name: admission.is_ours(tool.name) for tool in generate.tools}
        check_tools(generate, rules_for(rules, self._rules).tools, ours)
        forced = admission.forced(generate, rules)
        estimate = admission.estimate(forced, rules)
        if summary is not None and summary.messages:
            estimate += admission.estimate(summary, rules)
        return Admitted(generate=forced, headers=await self._enter(caller, generate.id, rules, estimate, hold=hold))

    async def admit_write(self, caller: Caller) -> Mapping[str, str]:
        assert caller.key is not None
        rules = await self._admission.rules_now(caller.key)
        if not rules.rpm_limit:
            return {}
        # It uses no tokens, costs nothing, and has no answer that stays open.
        reply = await self._admission.ask(
            caller.key, "", KeyRules(rpm_limit=rules.rpm_limit), 0, hold="", gateway=self._name
        )
        headers = headers_of(reply, KeyRules(rpm_limit=rules.rpm_limit))
        if reply.refused:
            raise limited(reply, rules, headers)
        return headers

    async def admit_call(self, caller: Caller, call: ForwardedCall) -> Mapping[str, str]:
        assert caller.key is not None
        rules = await self._admission.rules_now(caller.key)
        check_call_allowed(call, rules, self._admission.aliases)
        estimate = 0
        if rules.max_budget is not None and call.is_metered:
            self._admission.check_priced([("model", call.provider, call.model)])
            estimate = most_cost_of_call(call, self._admission.prices)
        return await self._enter(caller, call.id, rules, estimate, hold=call.id, hold_s=call.longest_s)

    async def settle(self, caller: Caller, call: ForwardedCall, used: Usage | None) -> None:
        """See `AccessControl.settle`. Counted once, however often it is called."""
        assert caller.key is not None
        prices = self._admission.prices
        name = prices.name_for([f"{call.provider}/{call.model}"]) if call.model else None
        counts = token_counts(estimated_use(call, prices) if used is None else used, call.api)
        rules = await self.directory.rules_of(caller.key)
        settled = RunUse(
            seq=0,
            fresh=counts.fresh,
            cache_read=counts.cache_read,
            cache_write=counts.cache_write,
            output=counts.output,
            prices=prices.nano_per_token(name),
            price_name=name or "",
            ended=True,
        )
        script = count_use(
            self._admission.hold_keys(caller.key, call.id),
            call.id,
            spend=self._keys.gateway_spend(caller.key),
            use=self._keys.gateway_use(caller.key),
            tokens_per_minute=(rules and rules.tpm_limit) or 0,
            used=settled,
            keep_ms=round(HOLD_S * 1000),
        )
        with translated(self._server):
            await run_script(self._server, script)

    async def withdraw(self, caller: Caller, hold: str) -> None:
        # What another key of the tenant had reserved comes back to that key.
        assert caller.key is not None
        with translated(self._server):
            name, owner = await newest_hold(self._server, self._keys, hold) or (hold, caller.key)
        await self._admission.release(owner, name)

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

    async def _enter(
        self, caller: Caller, run: str, rules: KeyRules, estimate_nano: int, *, hold: str, hold_s: float = HOLD_S
    ) -> Mapping[str, str]:
        """Take what the limits give a run or a call. Returns headers of the answer. Raises Refusal (402, 429)."""
        assert caller.key is not None
        reply = await self._admitted(caller.key, run, rules, estimate_nano, hold=hold, hold_s=hold_s)
        headers = headers_of(reply, rules)
        if reply.refused:
            raise limited(reply, rules, headers)
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

    async def _admitted(
        self, key: str, run: str, rules: KeyRules, estimate_nano: int, *, hold: str, hold_s: float
    ) -> AdmissionReply:
        try:
            return await self._admission.ask(
                key, run, rules, estimate_nano, hold=hold, gateway=self._name, hold_s=hold_s
            )
        except BaseException:
            if rules.max_parallel_requests:
                self._unsure.add((key, run))
            raise

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
