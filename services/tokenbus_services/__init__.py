"""The worker services and commands of tokenbus. The library, `tokenbus`, never imports this package.

Imports only the standard library, because `cli.entry` does.
"""

from __future__ import annotations

import sys
from typing import Any


def import_structlog_alone() -> None:
    """Import structlog without rich, which it uses for tracebacks that `runtime.logs` writes as text.

    With pygments, rich is a seventh of the CPU of a worker's imports. Commands that show tables import it themselves.
    Raises ModuleNotFoundError.
    """
    modules: dict[str, Any] = sys.modules
    if "rich" in modules:
        return
    modules["rich"] = None  # an import of it fails (the language's reference, 5.3.1), and structlog does without
    try:
        import structlog  # noqa: F401  # pyright: ignore[reportUnusedImport]
    finally:
        del modules["rich"]
