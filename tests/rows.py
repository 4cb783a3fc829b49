"""One test over many rows: a case of its own for each costs more than what most of them check."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest


def over_rows(
    names: str | tuple[str, ...], rows: Iterable[Any], *, ids: Callable[[Any], Any] | Iterable[Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `pytest.mark.parametrize`, in one case. All rows are tried; those that fail are raised together, each named.

    Fixtures are set up once for all rows, so they may keep no state.
    """
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    listed = list(rows)
    named = [ids(row) for row in listed] if callable(ids) else listed if ids is None else list(ids)

    def values(row: Any) -> dict[str, Any]:
        return dict(zip(columns, (row,) if len(columns) == 1 else row, strict=True))

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        failures: list[Exception] = []

        def failed(error: Exception, name: Any) -> None:
            error.add_note(f"row: {name}")
            failures.append(error)

        def end() -> None:
            found, failures[:] = [*failures], []
            if found:
                raise ExceptionGroup(f"{len(found)} of {len(listed)} rows fail", found)

        def run(**fixtures: Any) -> None:
            assert listed, "no rows"
            for row, name in zip(listed, named, strict=True):
                try:
                    test(**values(row), **fixtures)
                except Exception as error:
                    failed(error, name)
            end()

        async def run_async(**fixtures: Any) -> None:
            assert listed, "no rows"
            for row, name in zip(listed, named, strict=True):
                try:
                    await test(**values(row), **fixtures)
                except Exception as error:
                    failed(error, name)
            end()

        chosen: Any = run_async if inspect.iscoroutinefunction(test) else run
        chosen.__name__, chosen.__qualname__, chosen.__doc__ = test.__name__, test.__qualname__, test.__doc__
        chosen.__module__ = test.__module__
        chosen.pytestmark = cast("list[pytest.Mark]", getattr(test, "pytestmark", []))
        signature = inspect.signature(test)
        chosen.__signature__ = signature.replace(
            parameters=[
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                for name, parameter in signature.parameters.items()
                if name not in columns
            ]
        )
        return chosen

    return decorate
