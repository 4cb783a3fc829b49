"""Where the modules of the deployment's own lie: tools and policies that the settings name."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def look_beside_settings() -> None:
    """Modules beside the settings file can be imported; without a file, those in the working directory."""
    config = os.environ.get("TOKENBUS_CONFIG")
    beside = str(Path(config).resolve().parent if config else Path.cwd())
    if beside not in sys.path:
        sys.path.append(beside)
