"""docs/reference/metrics.md has exactly the metrics that the code makes, each with its type and its labels."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.unit.docs.pages import ROOT, page, quoted, rows, sections

KINDS = {name: kind for kind in ("counter", "gauge", "histogram") for name in (kind, kind.capitalize())}
Metric = tuple[str, str, tuple[str, ...]]


def made() -> Iterator[Metric]:
    """Each metric that a module makes: name, type, labels."""
    for path in sorted((ROOT / "services").rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if any(f"{kind}(" in source for kind in KINDS) else ():
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS):
                continue
            if not (node.args and isinstance(node.args[0], ast.Constant)):
                continue
            given = [ast.literal_eval(each) for each in node.args[2:]]
            labels: list[str] = (
                given[0] if given and isinstance(given[0], list) else given
            )  # `gauge` takes them one by one
            yield str(node.args[0].value), KINDS[node.func.id], tuple(labels)


def test_each_metric_is_on_the_page_and_no_other() -> None:
    documented = {
        (quoted(name), kind, tuple(re.findall(r"`(\w+)`", labels)))
        for section in sections(page("reference/metrics.md")).values()
        for name, kind, labels, what in rows(section)
        if what and name.startswith("`")
    }
    assert documented == set(made())
