"""Where the deployment's own modules are: tools, policies, blob loaders and `auth` objects that the settings name."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def add_settings_directory_to_path(env: Mapping[str, str] = os.environ) -> None:
    """Modules in the directory of the settings file can be imported; without a file, those in the working directory."""
    config = env.get("TOKENBUS_CONFIG")
    directory = str(Path(config).resolve().parent if config else Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)
