"""`import tokenbus` is light: msgspec and redis are all that it needs, and all that it loads."""

from __future__ import annotations

import subprocess
import sys

_IMPORT = """
import sys
from importlib.abc import MetaPathFinder

FRAMEWORKS = (
    "tokenbus.faststream",
    "tokenbus.integrations.livekit",
    "tokenbus.integrations.pipecat",
    "tokenbus.testing",
)
ALLOWED = {"tokenbus", "msgspec", "redis", "hiredis", "async_timeout"}

class OnlyTheLight(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ALLOWED and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, OnlyTheLight())
before = set(sys.modules)
import pkgutil, importlib
import tokenbus
for module in pkgutil.walk_packages(tokenbus.__path__, "tokenbus."):
    # The users of these have FastStream, the services, or a framework for voice.
    if not module.name.startswith(FRAMEWORKS):
        importlib.import_module(module.name)
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded - ALLOWED - set(sys.stdlib_module_names)))
"""


def test_the_whole_library_imports_with_only_msgspec_and_redis_installed():
    result = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
