"""A worker may open as many files as its system lets it."""

from __future__ import annotations

import asyncio
import sys

import pytest

CHECK = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
hard = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
from tokenbus_services.cli.worker import raise_open_files
print(raise_open_files({needed}), hard)
"""


@pytest.mark.parametrize(("needed", "logged"), [(100, False), (1_000_000, True)])
async def test_the_soft_limit_becomes_the_hard_one_and_a_low_one_is_logged(needed: int, logged: bool) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHECK.format(needed=needed)), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    *log, last = out.decode().splitlines()
    limit, hard = last.split()
    assert limit == hard
    assert any("open_files_low" in line for line in log) == logged
