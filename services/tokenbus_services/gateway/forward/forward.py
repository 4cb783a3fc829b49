"""Forwards a request: whose it is, which provider it goes to, what it costs, and what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from tokenbus.bus.liveness import Liveness
from tokenbus.client.publishing import new_run_id
from tokenbus.errors import ServerError
from tokenbus.events.quirks import segment_problem
from tokenbus.events.usage import Usage
from tokenbus_services.endpoints.endpoint import Endpoint, Providers
from tokenbus_services.endpoints.limiter import Limiter, LimitRefusal, Reservation, ReservationRequest, Scopes
from tokenbus_services.gateway.audit import AuditedRun
from tokenbus_services.gateway.budgets.estimate import DOCUMENT_TOKENS
from tokenbus_services.gateway.callers import AccessControl, Caller, ForwardedCall
from tokenbus_services.gateway.forward.bodies import JsonBody, with_own_results
from tokenbus_services.gateway.forward.call import (
    UPLOAD_URL,
    CallFailed,
    ForwardedAnswer,
    ProviderCall,
    answer_to,
    returned_headers,
    sent_headers,
    unless_gone,
    whole_body,
)
from tokenbus_services.gateway.forward.form import FormScan, StreamedForm, is_form
from tokenbus_services.gateway.forward.owners import MAX_NAMED, OWNED, Owner
from tokenbus_services.gateway.forward.table import PROVIDER, ForwardedPath
from tokenbus_services.gateway.http_request import declared_size, headers_in
from tokenbus_services.gateway.models import RoutedModel
from tokenbus_services.gateway.problem import Problem, Refusal, invalid, unsupported
from tokenbus_services.gateway.request_spans import RequestSpans
from tokenbus_services.gateway.runs import GatewayRuns
from tokenbus_services.gateway.surfaces.contract import left_out_header
from tokenbus_services.gateway.surfaces.surface import DEFAULT_MODEL
from tokenbus_services.net.web_socket import FairShare
from tokenbus_services.settings import Settings
from tokenbus_services.settings.tables.gateway import ForwardKind

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

LIMIT_WAIT_S = 5.0
"""How long a call waits for room in the limits of its provider, model and tenant."""
_BYTES_PER_TOKEN = 4
_SETTLE_TRIES, _SETTLE_PAUSE_S = 20, 0.5
UPLOAD = "upload_id"
"""Parameter with the ticket of an upload, whose client sends no key with its content."""
_UNSENT_QUERY = ("key", "api_key", "access_token")


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes."""

    endpoint: Endpoint
    model: str = ""
    """As the provider calls it."""
    name: str = ""
    """As the client named it."""

    @property
    def label(self) -> str:
        """What the audit shows."""
        return self.name or self.endpoint.name


class Forwarder:
    """Makes the calls of all forwarded paths. Call `open` first, and `close` last."""

    def __init__(
        self, settings: Settings, access: AccessControl, spans: RequestSpans | None, runs: GatewayRuns
    ) -> None:
        """Raises SettingsError if a provider's `auth` cannot be created."""
        assert settings.gateway
        self._settings = settings.gateway
        self._configured = settings.providers
        self._access = access
        self._spans = spans
        self.owners = runs.owners
        self.changes = runs.changes
        self._scopes = Scopes(settings.limits, runs.keys)
        self._server = runs.server
        self._limiter: Limiter | None = None
        self._providers = Providers(settings) if settings.gateway.forward else None
        """A gateway that forwards nothing has no keys of providers."""
        self._settling: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    async def open(self, liveness: Liveness, *, worker: str) -> None:
        """``worker``: this gateway's name."""
        if self._providers:
            self._limiter = Limiter(self._server, worker=worker, liveness=liveness)
            await self._limiter.open()

    async def close(self) -> None:
        """Count what is not counted yet, and close all connections."""
        self._closing.set()
        await asyncio.gather(*self._settling, return_exceptions=True)
        if self._limiter:
            await self._limiter.close()
        if self._providers:
            await self._providers.close()

    def forwards(self, path: ForwardedPath, caller: Caller) -> bool:
        return path.kind in self._settings.forward and caller.may_forward(path.kind)

    def check(self, path: ForwardedPath, caller: Caller, url: str) -> None:
        """Raise Refusal (404, 403) if this path is not forwarded for this caller."""
        if path.kind not in self._settings.forward:
            raise path.off(url)
        if not caller.may_forward(path.kind):
            raise path.not_allowed()
        if path.lists_all and not caller.operator:
            why = f"this {path.what}, also those of others: only operators' keys may use it"
            raise Refusal(Problem(status=403, code="list_not_allowed", message=why, kind="auth"))

    def target(
        self,
        path: ForwardedPath,
        caller: Caller,
        model: str | None,
        headers: Mapping[str, str],
        owned: str | None = None,
    ) -> Target:
        """The provider of a request. ``owned``: that of the things that it names. Raises Refusal."""
        if model is None and path.names_model and path.needs_model:
            raise invalid("model", "is missing")
        if model is None:
            return self.of_provider(path, caller, owned or headers.get(PROVIDER))
        target = self._of_model(path, caller, model.removeprefix("models/") if path.family == "gemini" else model)
        if owned not in (None, target.endpoint.name):
            raise invalid("model", f"is not of the provider {owned}, which has what the request names")
        return target

    def of_provider(self, path: ForwardedPath, caller: Caller, name: str | None) -> Target:
        """The provider of a request without a model. Raises Refusal."""
        speaking = [each for each, settings in self._configured.items() if settings.api in path.providers]
        if name is None and len(speaking) == 1:
            (name,) = speaking
        if name is None:
            try:
                return msgspec.structs.replace(self._of_model(path, caller, DEFAULT_MODEL), model="", name="")
            except Refusal:
                why = (
                    f"the request names no model, so it needs the header {PROVIDER}: NAME of a provider that speaks "
                    f"{' or '.join(path.providers)}, or the deployment an alias {DEFAULT_MODEL!r} to one, or no other"
                )
                raise invalid(PROVIDER, why) from None
        if name not in self._configured:
            why = f"there is no provider {name[:100]!r}"
            raise Refusal(Problem(status=404, code="provider_not_found", message=why, kind="not_found", param=PROVIDER))
        if (api := self._configured[name].api) not in path.providers:
            raise path.wrong_api(name, api)
        return Target(endpoint=self._endpoint(name))

    def _of_model(self, path: ForwardedPath, caller: Caller, name: str) -> Target:
        """The first provider of the name that has this path."""
        resolved = caller.rules.models.resolve(name)
        choices = [(resolved.provider, resolved.model), *((one.provider, one.model) for one in resolved.fallback)]
        for provider, model in choices:
            settings = self._configured[provider]
            if settings.api in path.providers:
                true_model = settings.true_model(model)
                return Target(endpoint=self._endpoint(provider), model=true_model, name=name)
        raise path.wrong_api(resolved.provider, resolved.api)

    def _endpoint(self, name: str) -> Endpoint:
        assert self._providers
        return self._providers.get(name)

    async def json(
        self, path: ForwardedPath, request: Request, caller: Caller, body: JsonBody | None
    ) -> ForwardedAnswer | Response:
        """Forward a request whose body is JSON, or that has none. Raises Refusal, TokenbusError, ClientDisconnect."""
        headers = headers_in(request)
        dropped = [name for name in path.ours if body and body.has(name)]
        for name in dropped:
            if name not in self._settings.drop_unsupported:
                raise unsupported(name, "a stored conversation is not forwarded: send what it holds")
        if body:
            body.leave_out(dropped)
        if body and not OWNED.isdisjoint(self._settings.forward):
            body.unambiguous()
            await self.owners.check(caller, body.encoded)
        in_path: str | None = request.path_params.get("model")
        content, models, owned = None, frozenset[str](), None
        if body and path.body == "requests":
            targets = [self._of_model(path, caller, name) for name in body.models_of_requests()]
            target, models = targets[0], frozenset(each.model for each in targets)
            if any(each.endpoint is not target.endpoint for each in targets):
                raise invalid("requests", "are for several providers: a batch is for one")
            content = body.with_models([each.model for each in targets])
        else:
            owned = await self._owned(path, request, caller, body)
            named = in_path if in_path is not None else body.text("model") if body else None
            target = self.target(path, caller, named, headers, owned)
            if body and named is not None and path.family == "gemini":
                content = body.with_gemini_model(target.model)
            elif body:
                content = body.encoded if named is None else body.with_model(target.model)
        work = Work(self, path, request, caller, target, headers=left_out_header(dropped))
        in_file = path.kind == "batches" and not path.seen and (owned is not None or not target.model)
        await work.admit(input_tokens=len(content or b""), models=models, in_file=in_file)
        return await work.answer(content)

    async def _owned(self, path: ForwardedPath, request: Request, caller: Caller, body: JsonBody | None) -> str | None:
        """The provider that has the things that a request names; None if it names none that the table has.

        Raises Refusal (404) for things that are not the caller's.
        """
        found: str | None = None
        named = [("id", str(request.path_params["id"]))] if "{id}" in path.path else []
        named += [(name, text) for name in path.takes for text in (body.texts(name) if body else ())]
        if len(named) > MAX_NAMED:
            raise invalid(named[-1][0], f"names more than {MAX_NAMED} things")
        for param, one in named:
            owner = await self.owners.of(caller, one.rpartition("/")[2] if path.family == "gemini" else one, param)
            if owner is not None:
                if found is not None and owner.provider != found:
                    raise invalid(param, "is of another provider")
                found = owner.provider
        return found

    async def form(
        self, path: ForwardedPath, request: Request, caller: Caller, room: FairShare, upload: Owner | None = None
    ) -> ForwardedAnswer | Response:
        """Forward a form, or the content of an upload, as it comes. Only what comes before a form's model is held.
        Raises as `json`.
        """
        headers = headers_in(request)
        size = declared_size(headers, most_bytes=self._settings.forward_bytes)
        target: Target | None = None

        def rename(name: str) -> str:
            nonlocal target
            target = self._of_model(path, caller, name)
            return target.model

        scan = FormScan(headers.get("content-type", ""), rename) if path.body == "form" else None
        if path.body == "file" and not is_form(headers.get("content-type", "")):
            raise invalid("content-type", "must be multipart/form-data")
        form = StreamedForm(request, scan, room, self._settings)
        if scan is not None:
            await form.find_model()
        if target is None:
            owned = upload.provider if upload else await self._owned(path, request, caller, None)
            target = self.target(path, caller, None, headers, owned)
        work = Work(self, path, request, caller, target, upload=upload)
        work.was_read = form.was_read
        form.holds_all = target.endpoint.needs_body
        await work.admit(input_tokens=DOCUMENT_TOKENS)
        more = {"content-length": str(size + (scan.growth if scan else 0))} if size else {}
        return await work.answer(form.content(), more)

    async def reserve(self, caller: Caller, call: ForwardedCall) -> Reservation:
        """Take what the limits of the provider, the model and the tenant give, as the fetchers do. Raises Refusal
        (429).
        """
        assert self._limiter
        scopes = self._scopes.of(call.provider, call.model, caller.tenant)
        tokens = call.input_tokens // _BYTES_PER_TOKEN
        asked = ReservationRequest(call.id, caller.tenant, scopes, tokens, call.provider)
        verdict = await self._limiter.reserve_within(asked, LIMIT_WAIT_S)
        if isinstance(verdict, LimitRefusal):
            why = f"the limits of this {verdict.scope.kind} have no room for this call"
            raise Refusal(
                Problem(
                    status=429,
                    code="limit_wait",
                    message=why,
                    kind="rate_limit",
                    retry_after_s=verdict.seconds,
                    should_retry=True,
                )
            )
        return verdict

    def give_back(self, taken: Reservation, used: int | None, wait_s: float | None = None) -> None:
        """A call has ended. ``used``: its tokens; None: unknown. ``wait_s``: how long its provider asked to pause."""
        assert self._limiter
        self._limiter.refund(taken, used)
        if wait_s:
            self._limiter.pause(taken.request, wait_s)

    def begin_span(self, call: str, traceparent: str | None) -> Any:
        """The span of a call, beneath the client's."""
        return self._spans.begin(call, traceparent) if self._spans else None

    async def admit(self, caller: Caller, call: ForwardedCall) -> Mapping[str, str]:
        return await self._access.admit_call(caller, call)

    async def admit_estimate(self, caller: Caller, kind: ForwardKind, model: RoutedModel) -> Mapping[str, str]:
        """Take what the limits give for an answer that costs nothing. Raises Refusal, ServerError."""
        call = ForwardedCall(
            id=f"call-{new_run_id()}",
            kind=kind,
            provider=model.provider,
            model=model.model,
            api=self._configured[model.provider].api,
            is_metered=False,
            longest_s=1.0,
        )
        headers = await self.admit(caller, call)
        self.settle_later(caller, call, Usage())
        return headers

    def settle_later(self, caller: Caller, call: ForwardedCall, used: Usage | None, *, sent: bool = True) -> None:
        """Count what a call used, in a task of its own, and give back its place. ``sent``: False for a call that no
        provider has, or that it refused.
        """
        task = asyncio.create_task(self._settle(caller, call, used, sent=sent), name=call.id)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, caller: Caller, call: ForwardedCall, used: Usage | None, *, sent: bool) -> None:
        for n in range(_SETTLE_TRIES):
            try:
                if sent:
                    await self._access.settle(caller, call, used)
                else:
                    await self._access.withdraw(caller, call.id)
                await self._access.leave(caller, call.id)
            except ServerError as e:
                if n == _SETTLE_TRIES - 1 or self._closing.is_set():
                    log.error("forwarded_call_not_counted", call=call.id, key=caller.key, error=str(e))
                    return
                await asyncio.sleep(_SETTLE_PAUSE_S)
            except Exception:
                log.exception("forwarded_call_not_counted", call=call.id, key=caller.key)
                return
            else:
                return

    def answer_options(self) -> dict[str, Any]:
        return {"most_bytes": self._settings.forward_bytes, "send_timeout_s": self._settings.send_timeout_s}


class Work:
    """One request on its way: `admit` it, then `answer`."""

    def __init__(
        self,
        forwarder: Forwarder,
        path: ForwardedPath,
        request: Request,
        caller: Caller,
        target: Target,
        *,
        upload: Owner | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """``headers``: of the answer."""
        self._forwarder = forwarder
        self._path = path
        self._request = request
        self._caller = caller
        self._target = target
        self._upload = upload
        self._headers: Mapping[str, str] = headers or {}
        self._call: ForwardedCall | None = None
        self._taken: Reservation | None = None
        self.was_read = asyncio.Event()
        """Whether the client has sent its whole request."""
        self.was_read.set()
        self.use: AuditedRun | None = None

    async def admit(self, *, input_tokens: int, **more: Any) -> None:
        """Take what the limits of the key give. Raises Refusal, ServerError."""
        path, target = self._path, self._target
        settings = target.endpoint.settings
        longest_s = settings.connect_timeout_s + settings.first_event_timeout_s + settings.call_timeout_s
        call = ForwardedCall(
            id=f"call-{new_run_id()}",
            kind=path.kind,
            provider=target.endpoint.name,
            model=target.model,
            api=settings.api,
            is_metered=path.is_metered,
            input_tokens=input_tokens,
            has_output=path.has_output,
            longest_s=longest_s,
            seen=path.seen,
            **more,
        )
        span = self._forwarder.begin_span(call.id, headers_in(self._request).get("traceparent"))
        self._request.state.use = self.use = AuditedRun(run=None, model=target.label, span=span)
        self._headers = {**self._headers, **await self._forwarder.admit(self._caller, call)}
        self._call = call

    async def answer(self, content: Any, more: Mapping[str, str] | None = None) -> ForwardedAnswer | Response:
        """Make the call. ``more``: further headers. Raises Refusal, ServerError, ClientDisconnect."""
        assert self._call
        assert self.use
        try:
            sending = self._send(self.provider_call(content, more or {}))
            response = await unless_gone(sending, self._request.receive, self.was_read)
            path = self._path
            await self._note(path, response)
            if path.makes or path.begins_upload or path.lists_all or path.method == "DELETE":
                return await self._recorded(response)
        except BaseException as e:
            self.ended_by(e)
            raise
        return ForwardedAnswer(
            self._target.endpoint,
            response,
            headers=self._headers,
            use=self.use,
            settle=lambda complete, used: self._settle(used),
            **self._forwarder.answer_options(),
        )

    async def _note(self, path: ForwardedPath, response: httpx.Response) -> None:
        """Enter into the audit what the provider has changed. Raises ServerError."""
        if path.action is None or not response.is_success:
            return
        names = {name: str(value) for name, value in self._request.path_params.items() if name != "model"}
        try:
            await self._forwarder.changes.note(
                self._caller, "forward", path.action, provider=self._target.endpoint.name, **names
            )
        except BaseException:
            await response.aclose()
            raise

    async def _send(self, call: ProviderCall) -> httpx.Response:
        assert self._call
        self._taken = await self._forwarder.reserve(self._caller, self._call)
        return await answer_to(call)

    def _settle(self, used: Usage | None, *, sent: bool = True, wait_s: float | None = None) -> None:
        """The call has ended. See `Forwarder.settle_later`."""
        assert self._call
        if self._taken:
            tokens = (used.input or 0) + (used.output or 0) if used else None
            self._forwarder.give_back(self._taken, tokens if sent else 0, wait_s)
        self._forwarder.settle_later(self._caller, self._call, used, sent=sent)

    def ended_by(self, error: BaseException) -> None:
        """There will be no answer."""
        assert self.use
        self.use.end = "failed" if isinstance(error, Refusal) else "cut"
        sent = error.may_cost if isinstance(error, CallFailed) else not isinstance(error, Refusal)
        sent = sent and self.was_read.is_set()  # a provider does nothing with half a request
        self._settle(None, sent=sent, wait_s=error.problem.retry_after_s if isinstance(error, CallFailed) else None)

    async def _recorded(self, response: httpx.Response) -> Response:
        """A whole answer, once it is known whose the things are that it names. Raises Refusal, ServerError."""
        assert self.use
        endpoint, owners, path = self._target.endpoint, self._forwarder.owners, self._path
        data = await whole_body(endpoint, response)
        if path.method == "DELETE" and path.path.endswith("{id}"):
            await owners.forget(str(self._request.path_params["id"]))
        elif data and path.makes:  # what is made is known at the end of an upload, not after each piece
            body = JsonBody(data)
            ids = [text.rpartition("/")[2] for name in path.makes for text in body.texts(name)]
            await owners.add(self._caller, endpoint.name, ids)
        if b'"results_url"' in data:  # an address of the provider, to which clients would send the gateway's key
            data = with_own_results(data)
        headers = {**returned_headers(endpoint, response), **self._headers}
        if path.begins_upload and (url := response.headers.get(UPLOAD_URL)):
            ticket = await owners.begin_upload(self._caller, endpoint.name, url)
            headers[UPLOAD_URL] = str(self._request.url.replace(query=f"{UPLOAD}={ticket}"))
        self.use.end = "completed"
        self._settle(Usage())
        return Response(data, response.status_code, headers, media_type="application/json")

    def provider_call(self, content: Any, more: Mapping[str, str]) -> ProviderCall:
        """The call of the provider. Raises Refusal."""
        headers = {**sent_headers(headers_in(self._request)), **more}
        if content is None:
            headers.pop("content-type", None)
        return ProviderCall(
            endpoint=self._target.endpoint,
            method=self._path.method,
            path=(self._upload and self._upload.url) or self._filled(),
            headers=headers,
            query={k: v for k, v in self._request.query_params.items() if k not in _UNSENT_QUERY},
            content=content,
        )

    def _filled(self) -> str:
        """The path for the provider. Raises Refusal."""
        prefix = "/v1" if self._target.endpoint.settings.api == "anthropic" else ""
        names = {**self._request.path_params, "model": self._target.model}
        for name, value in names.items():
            if f"{{{name}}}" not in self._path.path:
                continue
            problem = segment_problem(value)
            if name != "model" and "/" in value:
                problem = "it cannot be part of a path"
            if problem:
                raise invalid(name, problem)
            names[name] = quote(value, safe="")
        base = self._target.endpoint.base_path + prefix
        return self._path.below(base).format(**names)
