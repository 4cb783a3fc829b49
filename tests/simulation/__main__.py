"""`python -m tests.simulation`: the model beside the measurement, then larger deployments."""

from __future__ import annotations

import argparse

from tests.simulation.compare import report
from tests.simulation.measurement import stored
from tests.simulation.scale import CLUSTER_RATE, larger, of_cluster, table


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument(
        "--cluster-times",
        type=int,
        metavar="N",
        help=f"only a Cluster of N times {CLUSTER_RATE:,.0f} chunks/s, event by event; 25 takes minutes",
    )
    options = parser.parse_args()
    measured = stored()
    if options.cluster_times:
        print(of_cluster(measured.costs, options.cluster_times))
        return
    print(report(measured), flush=True)
    print(table(larger(measured.costs)))


if __name__ == "__main__":
    main()
