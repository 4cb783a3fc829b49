"""`python -m maintenance.docsite`: gather the pages in build/docs, build the site in build/site, check its links."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from maintenance.docsite.links import problems
from maintenance.docsite.pages import BrokenLink, gather
from maintenance.docsite.plain_pages import write_plain_pages
from maintenance.docsite.reference import generated

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
PAGES = BUILD / "docs"
SITE = BUILD / "site"
CONFIG = Path(__file__).with_name("zensical.toml")


def main() -> int:
    for old in (PAGES, SITE):
        shutil.rmtree(old, ignore_errors=True)
    try:
        gather(ROOT, PAGES)
    except BrokenLink as e:
        print(e, file=sys.stderr)
        return 1
    for name, text in generated().items():
        (PAGES / name).parent.mkdir(parents=True, exist_ok=True)
        (PAGES / name).write_text(text, encoding="utf-8")
    shutil.copyfile(CONFIG, BUILD / CONFIG.name)  # zensical builds only below its configuration
    zensical = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", CONFIG.name]
    if subprocess.run(zensical, cwd=BUILD, check=False).returncode:
        return 1
    write_plain_pages(CONFIG, PAGES, SITE)
    found = problems(SITE)
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(ROOT)}, {len(found)} broken links")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
