"""What a key allows, applied to a request. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import cast

import msgspec

from tokenbus.events.requests import Generate
from tokenbus_services.gateway.callers import ForwardedCall
from tokenbus_services.gateway.models import ModelTable, ResolvedModel, RoutedModel
from tokenbus_services.gateway.problem import Problem, Refusal, tool_not_open
from tokenbus_services.gateway.surfaces.contract import TranslationRules
from tokenbus_services.settings.tables.gateway import KeyRules

Aliases = Mapping[str, Sequence[RoutedModel]]
_SCHEMAS = frozenset({"parameters", "parametersJsonSchema", "input_schema", "schema", "json_schema"})
"""Fields that hold JSON Schemas: what is called `model` there is an argument of a tool."""


class AllowedModels(ModelTable):
    """The names of a table that match one of the patterns."""

    def __init__(self, table: ModelTable, patterns: Sequence[str]) -> None:
        self._table = table
        self._patterns = patterns

    def names(self) -> list[str]:
        return [name for name in self._table.names() if _matches(name, self._patterns)]

    def resolve(self, name: str) -> ResolvedModel:
        """Raises Refusal: 403 for a name that the key does not allow, whether it exists or not."""
        written = name if "/" in name else name.replace(":", "/", 1)  # see `models`
        if not (_matches(name, self._patterns) or _matches(written, self._patterns)):
            raise not_allowed("model", _model_not_open(name), "model_not_allowed")
        return self._table.resolve(name)


def rules_for(rules: KeyRules, deployment: TranslationRules) -> TranslationRules:
    """What a key allows, of what the deployment allows."""
    tools = deployment.tools
    if rules.tools is not None:
        tools = frozenset(rules.tools) if tools is None else tools & frozenset(rules.tools)
    models = deployment.models if rules.models is None else AllowedModels(deployment.models, rules.models)
    extra = deployment.allow_extra | frozenset(rules.allow_extra)
    return msgspec.structs.replace(deployment, models=models, tools=tools, allow_extra=extra)


def check_allowed(generate: Generate, rules: KeyRules, aliases: Aliases) -> None:
    """Raise Refusal (403) if a provider and model of the request is not allowed, by its name or by that of an alias, or
    a webhook that it names.

    Every request passes here, also one that named provider, model and fallbacks itself, or a model for a tool that the
    provider runs.
    """
    _check_models(models_of(generate), rules, aliases)
    for i, name in enumerate(generate.webhooks):
        if name not in rules.webhooks:
            why = f"this key may not use the webhook {name[:200]!r}: `webhooks` of the key lists those that it may"
            raise not_allowed(f"webhooks[{i}]", why, "webhook_not_allowed")


def check_call_allowed(call: ForwardedCall, rules: KeyRules, aliases: Aliases) -> None:
    """Raise Refusal (403) if the key does not allow a model of the call, or, if it names none, any of its provider."""
    if call.model:
        _check_models([("model", call.provider, model) for model in {call.model, *call.models}], rules, aliases)
    elif rules.models is not None:
        through = {one.provider for name in aliases if _matches(name, rules.models) for one in aliases[name]}
        if call.provider not in through and not _matches(
            call.provider, [pattern.partition("/")[0] for pattern in rules.models]
        ):
            why = f"this key may not use the provider {call.provider!r}: `models` of the key lists none of its models"
            raise not_allowed("x-tokenbus-provider", why, "provider_not_allowed")
    if call.seen:
        return
    limits = ("max_budget", "max_tokens", "policies", *(("models",) if call.in_file else ()))
    if limiting := [name for name in limits if getattr(rules, name)]:
        why = f"what the provider does by itself for {call.kind} cannot be kept within `{limiting[0]}` of this key"
        raise not_allowed("", why, "batch_not_allowed" if call.kind == "batches" else "store_not_allowed")


def _check_models(choices: Iterable[tuple[str, str, str]], rules: KeyRules, aliases: Aliases) -> None:
    if rules.models is None:
        return
    through = {(one.provider, one.model) for name in aliases if _matches(name, rules.models) for one in aliases[name]}
    for where, provider, model in choices:
        if (provider, model) not in through and not _matches(f"{provider}/{model}", rules.models):
            raise not_allowed(where, _model_not_open(f"{provider}/{model}"), "model_not_allowed")


def models_of(generate: Generate) -> Iterator[tuple[str, str, str]]:
    """Yield each model that the request may use: where it names it, the provider, and the model.

    Besides the one that answers, these are the models of hosted tools, such as one that generates images.
    """
    yield "model", generate.provider, generate.model
    if generate.images and generate.images.model:
        yield "images.model", generate.provider, generate.images.model
    objects: list[tuple[str, str, object]] = [("extra", generate.provider, generate.extra)]
    for i, one in enumerate(generate.fallback or ()):
        yield f"fallback[{i}]", one.provider, one.model
        objects.append((f"fallback[{i}].extra", one.provider, one.extra))
    objects += ((f"tools[{i}].extra", generate.provider, tool.extra) for i, tool in enumerate(generate.tools))
    while objects:
        where, provider, value = objects.pop()
        if isinstance(value, list):
            objects += ((f"{where}[{i}]", provider, each) for i, each in enumerate(cast("list[object]", value)))
        elif isinstance(value, dict):
            for name, each in cast("dict[str, object]", value).items():
                if name == "model" and isinstance(each, str):
                    yield f"{where}.model", provider, each
                elif name not in _SCHEMAS:
                    objects.append((f"{where}.{name[:100]}", provider, each))


def check_tools(generate: Generate, allowed: Collection[str] | None, is_ours: Mapping[str, bool]) -> None:
    """Raise Refusal (403) for a tool that the bus would run and the key does not allow.

    ``is_ours``: for each tool of the request, whether the deployment has it.
    """
    if allowed is None or not generate.max_tool_depth:
        return
    for i, tool in enumerate(generate.tools):
        if is_ours[tool.name] and tool.name not in allowed:
            raise not_allowed(f"tools[{i}].name", tool_not_open(tool.name), "tool_not_allowed")


def with_forced(generate: Generate, rules: KeyRules, *, takes_max_tokens: bool = True) -> Generate:
    """The request with the fields that the key forces."""
    policies = [*generate.policies, *(name for name in rules.policies if name not in generate.policies)]
    forced = msgspec.structs.replace(generate, policies=policies, webhooks=list(rules.webhooks))
    if rules.record is not None:
        forced = msgspec.structs.replace(forced, record=rules.record)
    if rules.max_deadline_s is not None:
        deadline = min(rules.max_deadline_s, generate.deadline_s or rules.max_deadline_s)
        forced = msgspec.structs.replace(forced, deadline_s=deadline)
    if rules.max_tokens is not None and takes_max_tokens:
        forced = msgspec.structs.replace(
            forced, max_tokens=min(rules.max_tokens, generate.max_tokens or rules.max_tokens)
        )
    return forced


def not_allowed(param: str, why: str, code: str) -> Refusal:
    """A request that the key does not allow."""
    return Refusal(Problem(status=403, code=code, message=why, kind="auth", param=param or None))


def _model_not_open(name: str) -> str:
    return f"this key may not use the model {name[:200]!r}: `models` of the key lists those that it may"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
