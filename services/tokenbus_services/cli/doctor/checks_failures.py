"""The checks of `tokenbus doctor` on what providers and the blob store failed lately. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenbus.events.error_info import ErrorClass, ErrorInfo
from tokenbus_services.blobs.hints import FULL
from tokenbus_services.cli.doctor.checks import Finding
from tokenbus_services.cli.inspect.blob_facts import BlobFailure
from tokenbus_services.cli.inspect.provider_facts import FailingModel, SilentModel
from tokenbus_services.cli.render.provider_text import failure, time_span
from tokenbus_services.runtime.provider_hints import hint

LOOK_AT_LOG = "look at `attempt_ended` in the log of the parsers"

MOST_MODELS = 5
"""Maximum failing models of one provider that have a finding each."""


def check_failures(models: Iterable[FailingModel]) -> Iterator[Finding]:
    """Report models whose calls fail: for each provider the worst. ``models``: sorted, the worst first."""
    by_provider: dict[str, list[FailingModel]] = {}
    for model in models:
        by_provider.setdefault(model.failure.provider, []).append(model)
    for provider, failing in by_provider.items():
        yield from map(check_failing, failing[:MOST_MODELS])
        if more := failing[MOST_MODELS:]:
            calls = sum(model.all_failed for model in more)
            says = f"{calls} calls of {len(more)} other models failed too"
            yield Finding(level="note", about=f"provider {provider}", says=says)


def check_failing(model: FailingModel) -> Finding:
    """Report a model whose calls fail. It is an error if most calls still fail."""
    how = model.failure
    says = f"{how.model}: {model.failed} of {model.attempts} calls failed with {failure(how)}"
    if model.all_failed > model.failed:
        says += f", {model.all_failed - model.failed} in other ways"
    says += f"; the first {time_span(model.since_ms)} ago, the last {time_span(model.last_ms)} ago"
    if model.is_over:
        says += ", and calls have ended well after it"
    kind: ErrorClass = how.kind  # pyright: ignore[reportAssignmentType]
    advice = hint(how.provider, ErrorInfo(code=how.code, kind=kind, message="", status=how.status))
    level = "wrong" if model.is_down else "note"
    return Finding(level=level, about=f"provider {how.provider}", says=says, todo=advice or LOOK_AT_LOG)


def check_silent(model: SilentModel) -> Finding:
    """Report calls without an answer: an error if they are several, and no other is answered."""
    answered = f"{model.answered} others ended well since" if model.answered else "no other ended well since"
    return Finding(
        level="wrong" if model.is_down else "note",
        about=f"provider {model.provider}",
        says=f"{model.model}: {model.calls} calls have no byte of an answer, the oldest for "
        f"{time_span(model.since_ms)}; {answered}",
        todo=f"look at the provider's state, or lower first_event_timeout_s in [providers.{model.provider}] and set "
        "a fallback",
    )


def check_blob_failure(found: BlobFailure) -> Finding:
    """Report a store that could not keep or give a blob lately."""
    todo = FULL.get(found.code, "look at `blob_store_failed` in the log of the blob service")
    says = f"the store failed a request with {found.code} {time_span(1000 * found.ago_s)} ago"
    return Finding(level="wrong", about="blobs", says=says, todo=todo)
