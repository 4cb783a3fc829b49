"""`python -m maintenance.releasing VERSION [--do]`: checks, and with ``--do`` makes the release."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from maintenance.releasing.release import BY_HAND, Release, problems


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m maintenance.releasing", description=__doc__)
    parser.add_argument("version", help="as in 0.2.0")
    parser.add_argument("--do", action="store_true", help="change, commit, tag and build; without it, only check")
    options = parser.parse_args()
    release = Release(Path.cwd(), options.version)
    found = problems(release)
    for problem in found:
        print(f"not ready: {problem}")
    if found:
        return 1
    print(f"ready: version, tag v{release.version}, clean tree, changelog with what an operator must do")
    print("by hand, on this commit:")
    for each in BY_HAND:
        print(f"  [ ] {each}")
    if not options.do:
        print(f"nothing was changed; when all is done: make release VERSION={release.version} DO=1")
        return 0
    release.write(datetime.now(UTC).date())
    release.commit()
    for built in release.build():
        print(f"built {built}")
    print(f"committed and tagged v{release.version}; publish it: git push --follow-tags, then upload dist/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
