"""docs/reference/requests.md: its unchanged code for Node publishes the request."""

from __future__ import annotations

import re
from pathlib import Path

from tests.clients import node
from tests.unit.docs.pages import page
from tokenbus.testing import LocalBus


def test_the_code_for_node_publishes_a_request(tmp_path: Path) -> None:
    (code,) = re.findall(r"```js\n(.*?)```", page("reference/requests.md"), re.DOTALL)
    (tmp_path / "publish.mjs").write_text(code)
    (tmp_path / "node_modules").symlink_to(node.packages())
    with LocalBus() as local:
        local.model_says("claude-sonnet-4-6", "Yes, take it along.")
        done = node.run("publish.mjs", cwd=tmp_path, env=local.environment)
        assert done.returncode == 0, done.stderr
        with local.sync_client() as bus:
            assert bus.result("umbrella").text == "Yes, take it along."
