"""The page's pure modules, in Node; and what all files of the page must be like."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

from tests.clients.node import run

STATIC = Path(__file__).parents[2] / "services/tokenbus_services/console/static"
VENDOR = STATIC / "vendor"
OWN = sorted(path for path in STATIC.rglob("*.js") if VENDOR not in path.parents)
FORBIDDEN = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "style=$")
IMPORT = re.compile(r"""(?:from|import)\s*\(?\s*["']([^"'\s]+)["']""")


def test_the_pure_modules_do_what_their_tests_in_node_say() -> None:
    here = Path(__file__).parent
    done = run("--test", *sorted(here.glob("*.test.mjs")), cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr


def test_vendored_files_are_those_whose_hashes_are_written_down() -> None:
    lines = [line.split() for line in (VENDOR / "VERSIONS").read_text().splitlines() if not line.startswith("#")]
    listed = {name: digest for name, _package, _version, _source, digest in lines}
    found = {path.name: sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir() if path.name != "VERSIONS"}
    assert found == listed
    packages = {package.removeprefix("@preact/").removesuffix("-core") for _, package, *_ in lines}
    assert {f"{package}.LICENSE" for package in packages} <= found.keys()


def test_every_import_is_a_file_of_the_page() -> None:
    for path in [*OWN, *VENDOR.glob("*.js")]:
        for name in IMPORT.findall(path.read_text()):
            if name.startswith("."):
                assert (path.parent / name).resolve().is_file(), f"{path.name} imports {name}"
            else:
                assert VENDOR in path.parents, f"{path.name} imports {name}: no bundler resolves that"
                assert "uplot" in path.name  # the word stands in a comment of it


def test_no_file_of_the_page_makes_markup_or_code_out_of_text() -> None:
    for path in OWN:
        text = path.read_text()
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "style=$",
        ):
            assert word not in text, f"{path.name}: {word}"
    index = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\ssrc=)|\sstyle=|\son\w+=", index)
    assert "//" not in re.sub(r"<!doctype html>", "", index), "nothing comes from another host"
