"""``python -m tokenbus_services.executor MODULE FD``: the fork server for the calls of a module.

The module has a ``prepare`` (see `fork_server.main`). The worker is at the other end of the socket.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module

from tokenbus_services import absent

if __name__ == "__main__":
    gc.disable()  # imports leave no garbage, see `cli.entry`
    with absent("opentelemetry", "rich"):
        from tokenbus_services.executor import fork_server

        prepare = import_module(sys.argv[1]).prepare
    gc.enable()
    fork_server.main(prepare, int(sys.argv[2]))
