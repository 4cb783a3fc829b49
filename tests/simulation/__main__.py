"""`python -m tests.simulation`: the model beside what was measured, then larger deployments."""

from __future__ import annotations

from tests.simulation.compare import report
from tests.simulation.measurement import stored
from tests.simulation.scale import table


def main() -> None:
    """Print both."""
    measured = stored()
    print(report(measured), flush=True)
    print(table(measured))


if __name__ == "__main__":
    main()
