"""The worker services and commands of tokenbus. The library, `tokenbus`, never imports this package.

Imports only the standard library, because `cli.entry` does.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def absent(*names: str) -> Generator[None]:
    """Within it, an import of these modules fails, unless they were imported before.

    Libraries load some that they do without: redis the metrics of OpenTelemetry's SDK, structlog rich. Nothing uses
    that here, and it was a fifth of the CPU of the imports.
    """
    modules: dict[str, Any] = sys.modules
    missing = [name for name in names if name not in modules]
    modules.update(dict.fromkeys(missing))  # None: see the language's reference, 5.3.1
    try:
        yield
    finally:
        for name in missing:
            del modules[name]


def import_lightly() -> None:
    """Import redis and structlog without OpenTelemetry and rich, and httpx, whenever it comes, without its command.

    Commands that show tables import rich themselves. Raises ModuleNotFoundError.
    """
    with absent("opentelemetry", "rich"):
        import redis  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import structlog  # noqa: F401  # pyright: ignore[reportUnusedImport]
    modules: dict[str, Any] = sys.modules
    modules.setdefault("httpx._main", None)
