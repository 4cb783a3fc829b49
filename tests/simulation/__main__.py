"""`python -m tests.simulation [--small]`: the model beside what was measured, then larger deployments."""

from __future__ import annotations

import argparse

from tests.simulation.compare import report
from tests.simulation.measurement import stored
from tests.simulation.scale import table


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--small", action="store_true", help="leave the Cluster of 1 M chunks/s out")
    options = parser.parse_args()
    measured = stored()
    print(report(measured), flush=True)
    print(table(measured, full=not options.small))


if __name__ == "__main__":
    main()
