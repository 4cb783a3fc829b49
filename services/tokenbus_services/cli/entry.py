"""The installed `tokenbus` command; present in every installation, even if only the light client is installed.

Imports only the standard library until the command runs, so that it can say what is missing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from tokenbus_services import import_lightly

_INTERRUPTED = 130
_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command, and end the process with its exit code (see `exit_codes`)."""
    # Imports leave no garbage, but the collector would scan all new objects repeatedly, which takes a tenth of the
    # start. The command turns it on again after its imports.
    gc.disable()
    try:
        import_lightly()
        from tokenbus_services.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("tokenbus"):
            raise
        sys.stderr.write(f"error: {_missing(e.name)}\n")
        sys.exit(_USAGE)
    run(arguments)


def _missing(module: str | None) -> str:
    return (
        f"the command needs the extra `services` of tokenbus, and `embedded` to run its own server; {module!r} is "
        "not installed. From a checkout: pip install '.[services,embedded]'; from a wheel: "
        "pip install 'PATH/TO/tokenbus-VERSION.whl[services,embedded]'"
    )
