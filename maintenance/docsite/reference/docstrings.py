"""What stands in docstrings and signatures, as Markdown."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

_ROLE = re.compile(r"``([^`\n]+)``")
_ANNOTATION = re.compile(r"(: |-> )'([^']*)'")
_PAGE = re.compile(r"docs/([a-z/-]+\.md)")


def text_of(thing: object) -> str:
    """The docstring as Markdown; nothing if there is none of its own."""
    doc = getattr(thing, "__doc__", None)
    return markdown(inspect.cleandoc(doc)) if doc else ""


def markdown(doc: str) -> str:
    """Double backticks become single ones, and names of pages links; an indented block stays a block of code."""
    linked = _PAGE.sub(lambda m: f"[{m[1].removesuffix('.md')}](../{m[1]})", doc)
    return _ROLE.sub(r"`\1`", linked).replace("::\n", ":\n").strip()


def signature(name: str, function: Any) -> str:
    """How it is called, with every annotation as it is written in the code."""
    found = inspect.signature(function)
    parameters = [p for p in found.parameters.values() if p.name != "self"]
    shown = str(found.replace(parameters=parameters))
    shown = _ANNOTATION.sub(r"\1\2", shown)
    prefix = "async def " if inspect.iscoroutinefunction(function) else "def "
    line = f"{prefix}{name}{shown}"
    return line if len(line) <= 100 else _wrapped(line)


def _wrapped(line: str) -> str:
    """One parameter a line."""
    start = end = line.index("(") + 1
    depth, piece = 0, ""
    parts: list[str] = []
    for letter in line[start:]:
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            if depth == 0:
                break
            depth -= 1
        if letter == "," and depth == 0:
            parts.append(piece.strip())
            piece = ""
        else:
            piece += letter
        end += 1
    parts += [piece.strip()] if piece.strip() else []
    return line[:start] + "\n" + "".join(f"    {part},\n" for part in parts) + line[end:]


def field_docs(kind: type) -> dict[str, str]:
    """The text that stands under each field of a class and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for field, text in _own_fields(base):
            found[field] = text or found.get(field, "")
    return found


def _own_fields(kind: type) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):
        return
    assert isinstance(tree.body[0], ast.ClassDef)
    body = tree.body[0].body
    for at, statement in enumerate(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            after = body[at + 1] if at + 1 < len(body) else None
            told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = inspect.cleandoc(str(after.value.value)) if told else ""  # type: ignore[union-attr]
            yield statement.target.id, " ".join(markdown(text).split())


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
