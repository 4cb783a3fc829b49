"""The errors page has exactly the classes and codes with which the code ends a run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import get_args

from maintenance.docsite.reference.errors import page
from maintenance.docsite.reference.run_codes import CLASSES, CODES
from tests.unit.docs.pages import ROOT
from tokenbus import errors
from tokenbus.errors import TokenbusError
from tokenbus.events.error_info import ErrorClass


def sources() -> list[str]:
    return [path.read_text() for room in ("shared", "services") for path in sorted((ROOT / room).rglob("*.py"))]


def constants() -> dict[str, str]:
    """Every name that a module assigns to a text of one word."""
    return dict(re.findall(r'(?m)^(\w+)(?:: [\w\[\], ]+)? = "(\w+)"$', "\n".join(sources())))


def made() -> Iterator[tuple[str, str, bool]]:
    """Code, class and retryable of each `ErrorInfo` that is made with a code that the source names."""
    names = constants()
    for source in sources():
        for node in ast.walk(ast.parse(source)) if "ErrorInfo(" in source else ():
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ErrorInfo"):
                continue
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            code, kind = given.get("code"), given.get("kind")
            if isinstance(code, ast.Name):
                code = ast.Constant(names[code.id]) if code.id in names else code
            if isinstance(code, ast.Constant) and isinstance(kind, ast.Constant):
                yield str(code.value), str(kind.value), "retryable" in given


def test_each_code_of_a_run_is_on_the_page_with_its_class_and_no_other() -> None:
    assert {(code, documented.kind, documented.retryable) for code, documented in CODES.items()} == set(made())


def test_each_class_is_on_the_page_and_no_other() -> None:
    assert set(CLASSES) == set(get_args(ErrorClass))


def test_each_error_of_the_tree_is_on_the_page() -> None:
    text = page()
    tree = [error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, TokenbusError)]
    assert [error for error in tree if f"`{error.__name__}` | `{error.code}`" not in text] == []
