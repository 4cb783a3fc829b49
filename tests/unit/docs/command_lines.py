"""Checks that a command line which a page shows can be typed: it names what exists, and its arguments are accepted."""

from __future__ import annotations

import os
import re
import shlex
from itertools import takewhile
from pathlib import Path

import click

from tests.unit.docs.pages import ROOT
from tokenbus_services.cli.main import tokenbus

_VARIABLE = re.compile(r"[A-Z_]+=.*")
_PLACEHOLDER = re.compile(r"[A-Z]{1,12}|\[.*")
_NOT_OURS = {".git", ".venv", "__pycache__", "build", "dist", "node_modules"}
_REDIRECTIONS = {">", "2>", "|", "&&"}
_BEFORE = {"docker", "kubectl", "sudo"}
"""Commands whose arguments may be a command line of `tokenbus`."""


def targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def check_line(line: str, *, complete: bool = True) -> None:
    """Raise AssertionError or `click.UsageError` if the line cannot be typed. ``complete`` False: a sentence names the
    command; it may leave required arguments out, and write a placeholder in capitals.
    """
    words = [word for word in shlex.split(line.removeprefix("$ "), comments=True) if not _VARIABLE.fullmatch(word)]
    words = list(takewhile(lambda word: word not in _REDIRECTIONS, words))
    if not words:
        return
    first = words[0].removeprefix(".venv/bin/")
    if first == "make":
        assert {word for word in words[1:] if "=" not in word} <= targets(), line
    elif first == "tokenbus":
        _check_tokenbus(words[1:], complete=complete)
    elif first in _BEFORE and "tokenbus" in words:
        of_tokenbus = words[words.index("tokenbus") + 1 :]
        if of_tokenbus[:1] and of_tokenbus[0] in tokenbus.commands:  # else a namespace, or an image
            _check_tokenbus(of_tokenbus, complete=complete)
    elif first == "python" and words[1:2] == ["-m"]:
        _check_module(words[2], words[3:])
    elif words[:2] == ["pip", "install"]:
        extras = re.search(r"\[([\w,]+)\]", line)
        declared = (ROOT / "pyproject.toml").read_text()
        assert not extras or all(f"\n{extra} = [" in declared for extra in extras[1].split(",")), line


def _check_tokenbus(words: list[str], *, complete: bool) -> None:
    vague = not complete and (not words or any(_PLACEHOLDER.fullmatch(word) for word in words))
    words = [word for word in words if not word.startswith("[")]
    current: click.Command = tokenbus
    context: click.Context | None = None
    while True:
        try:
            context = current.make_context(current.name, list(words), parent=context)
        except click.exceptions.Exit:
            return  # --help, --version
        except click.exceptions.NoArgsIsHelpError:
            assert not complete, f"{current.name} needs a command"
            return
        except click.MissingParameter:
            assert not complete, f"{current.name} {words}: an argument is missing"
            return
        except click.BadParameter:
            assert vague, f"{current.name} {words}: a wrong value"
            return
        rest = [*context._protected_args, *context.args]
        if not isinstance(current, click.Group) or not rest:
            return
        _, found, words = current.resolve_command(context, rest)
        assert found
        current = found


def _check_module(module: str, arguments: list[str]) -> None:
    if module == "pytest":
        tried = [word for word in arguments if "/" in word and not word.startswith("-")]
        assert all((ROOT / word).exists() for word in tried), arguments
        if "-k" in arguments:
            words = {*arguments[arguments.index("-k") + 1].split()} - {"and"}
            tests = [test for word in tried for test in _tests_in(ROOT / word)]
            assert any(all(word in test for word in words) for test in tests), f"no test has {words} in its name"
        return
    path = ROOT / module.replace(".", "/")
    source = next((file for file in (path.with_suffix(".py"), path / "__main__.py") if file.exists()), None)
    assert source, f"no module {module}"
    for word in arguments:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in source.read_text(), f"{module} has no option {word}"


def _tests_in(path: Path) -> list[str]:
    sources = [path] if path.is_file() else [*path.rglob("test_*.py")]
    return [test for source in sources for test in re.findall(r"^(?:async )?def (test_\w+)", source.read_text(), re.M)]


def files() -> set[str]:
    """The files and folders of the repository, each with all ends of its path: `settings/file.py` is one."""
    ends: set[str] = set()
    for folder, below, names in os.walk(ROOT):
        below[:] = [name for name in below if name not in _NOT_OURS]
        for name in [*below, *names]:
            parts = (Path(folder) / name).relative_to(ROOT).parts
            ends |= {"/".join(parts[n:]) for n in range(len(parts))}
    return ends


def is_written_here(path: Path) -> bool:
    """Whether we wrote the page, and not a package that an example installed."""
    return not _NOT_OURS & {*path.relative_to(ROOT).parts}
