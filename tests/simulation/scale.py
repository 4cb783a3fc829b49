"""The needs of 10,000, 1 M and 50 M chunks/s, from the unit costs: processes, nodes, p99, and what saturates first.

10,000 chunks/s, one cell and a Cluster of 40,000 and 80,000 chunks/s are simulated event by event, with gateways that
read the public events. Larger sizes are a fluid model: cells share nothing, and of a Cluster only means are computed,
against the bounds that it would reach if workers, nodes and partitions grew with the rate. The simulated Clusters show
whether the means stay constant while it grows.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, sqrt

import msgspec

from tests.simulation.costs import Costs
from tests.simulation.deployment import Deployment, Outcome, Shape, arriving
from tests.simulation.fit import GATEWAY
from tokenbus.bus.keys import MAX_PARTITIONS
from tokenbus_services.cli.slots import even_numbers

SEED = 18
PACE, CHUNKS, BURST, HOT_SHARE = 50.0, 500.0, 10.0, 0.05
"""A run writes 50 chunks/s, 500 on average; ten arrive at once; 5 % of all chunks are of runs twenty times as fast."""
NETWORK_US = 100.0
"""Between two hosts of one data centre, in one direction."""
AIM, MOST = 0.6, 0.85
"""The share of a core that is planned for a process, and the most that the busiest process of a kind may use. Half a
core is no sign of saturation: batches grow with load, so the same process handles several times as much.
"""
STEPS = 6
CLUSTER_RATE, CLUSTER_NODES = 40_000.0, 3
GROWN = (2,)
"""Factors by which the fluid is compared with events."""
LARGE = (1_000_000.0, 50_000_000.0)
P99_MS = 100.0
"""The limits of a plan."""
WARM_S, SECONDS = 0.3, 0.8
CELL_RATES = (20_000.0, 40_000.0, 60_000.0, 80_000.0, 100_000.0, 150_000.0, 200_000.0, 300_000.0)
CELL_ROOM = 0.7
"""Maximum share of its node that a cell uses."""
JOINED = 10
"""Chunks of a run in one batch of a process that works off a backlog."""
TAKE_OVER_S = 3.25
"""The lease of a dead worker, plus a tick."""
FETCHER_LOST_S = 4.0
"""Time until other workers treat a fetcher without a heartbeat as dead."""
FAIL_OVER_S = 10.0
"""Time until a replica serves: `cluster-node-timeout` of 5 s, the election and the clients' new connections.
Assumed.
"""
POLLS = 2.5
"""Commands a second that a fetcher sends for each partition of a Cluster, at any load: a read of `turns` every 500 ms,
one of `control` every 2 s (`bus/work_queue/`, `bus/control.py`).
"""
MAX_CLIENTS = 10_000
"""Default number of connections of a server."""
CONNECTIONS = 2
"""Blocking reads of a fetcher for each partition of a Cluster, each on a connection of its own."""
INTAKE_US = 400.0
"""CPU of the node of `tokenbus:requests` per request. Assumed: half of the 770 µs that a server used for each run that
opened (600 runs, on a busy machine); the other half is on the run's own partition.
"""


class Plan(msgspec.Struct, frozen=True):
    """One size, and the model's figures for it."""

    name: str
    rate: float
    shape: Shape
    p50_ms: float
    p99_ms: float
    busiest: dict[str, float]
    cpu_us: float
    """Per chunk, of all processes."""

    @property
    def first(self) -> str:
        """What saturates first: the kind of process whose busiest one has the least spare capacity."""
        return max(self.busiest, key=lambda kind: self.busiest[kind])


def simulate(shape: Shape, costs: Costs, rate: float, *, seconds: float = SECONDS) -> Outcome:
    """Simulate this many chunks a second."""
    deployment = Deployment(shape, costs, seed=SEED)
    runs = arriving(seconds, rate, seed=SEED, pace=PACE, chunks=CHUNKS, burst=BURST, hot=HOT_SHARE)
    deployment.feed(runs)
    return deployment.run(seconds, warm_s=WARM_S)


def sized(name: str, costs: Costs, rate: float, *, cluster: bool = False) -> Plan:
    """The smallest shape, in steps, of which no process is beyond `MOST`; after `STEPS`, the last one as it is."""
    nodes = max(CLUSTER_NODES, _least(costs, "server", rate)) if cluster else 1
    shape = Shape(nodes=nodes, cluster=cluster, network_us=NETWORK_US, subscriber=GATEWAY)
    wanted = {
        kind: _least(costs, process, rate)
        for kind, process in (("fetchers", "fetcher"), ("normalizers", "normalizer"), ("parsers", "parser"))
    }
    shape = _with_partitions(msgspec.structs.replace(shape, **wanted, subscribers=_least(costs, GATEWAY, rate)))
    outcome = simulate(shape, costs, rate)
    for _ in range(STEPS):
        over = {kind: share for kind, share in outcome.busiest.items() if share > MOST}
        if not cluster:
            over.pop("server", None)  # there is one
        if not over:
            break
        fields = {
            "server": "nodes",
            GATEWAY: "subscribers",
            "fetcher": "fetchers",
            "normalizer": "normalizers",
            "parser": "parsers",
        }
        more = {fields[kind]: _more(getattr(shape, fields[kind]), share) for kind, share in over.items()}
        shape = _with_partitions(msgspec.structs.replace(shape, **more))
        outcome = simulate(shape, costs, rate)
    return _plan(name, rate, shape, outcome)


def _plan(name: str, rate: float, shape: Shape, outcome: Outcome) -> Plan:
    waits = outcome.wait_ms(0.5), outcome.wait_ms(0.99)
    return Plan(name, rate, shape, *waits, outcome.busiest, sum(outcome.cpu_us.values()))


def _least(costs: Costs, kind: str, rate: float) -> int:
    cost = costs.processes[kind]
    return max(1, ceil(rate * (cost.chunk_us + cost.item_us / 4) / 1e6 / AIM))


def _more(count: int, share: float) -> int:
    return max(count + 1, ceil(count * min(share, 1.5) / AIM))


def _with_partitions(shape: Shape) -> Shape:
    """Two partitions for each worker of the busiest stage; in a Cluster a number that spreads evenly over the nodes."""
    least = max(8, 2 * max(shape.normalizers, shape.parsers), 4 * shape.nodes if shape.cluster else 0)
    if shape.cluster:
        least = next((found.partitions for found in even_numbers(least, shape.nodes)), least)
    return msgspec.structs.replace(shape, partitions=least)


def cell(costs: Costs) -> Plan:
    """The most that a deployment with one server handles, in steps, while that server has spare capacity."""
    best: Plan | None = None
    for rate in CELL_RATES:
        found = sized("a cell", costs, rate)
        if best and (found.busiest["server"] > CELL_ROOM or found.p99_ms > P99_MS):
            break
        best = found
    assert best
    return best


class Bound(msgspec.Struct, frozen=True):
    """A limit that a single Cluster would reach."""

    what: str
    needs: float
    most: float

    @property
    def share(self) -> float:
        return self.needs / self.most


def bounds(costs: Costs, plan: Plan, rate: float) -> list[Bound]:
    """What a single Cluster of this rate needs of each bound that does not grow with it, the scarcest first.

    Workers and nodes grow with the rate from those of ``plan``, a simulated Cluster.
    """
    times = rate / plan.rate
    shape = plan.shape
    fetchers, nodes = shape.fetchers * times, shape.nodes * times
    partitions = max(8.0, shape.partitions * times)
    fetcher = costs.processes["fetcher"]
    fetcher_us = fetcher.turn_us + fetcher.cold_us
    starts = rate / CHUNKS
    found = [
        Bound("partitions", partitions, MAX_PARTITIONS),
        Bound("core of the node of `tokenbus:requests`", starts * INTAKE_US / 1e6, 1.0),
        Bound(
            "core of a fetcher, for its reads of all partitions",
            partitions * POLLS * fetcher_us / 1e6,
            1.0,
        ),
        Bound("connections of a node", fetchers * partitions * CONNECTIONS / nodes, MAX_CLIENTS),
        Bound("nodes of a Cluster", nodes, 1_000),
    ]
    return sorted(found, key=lambda bound: -bound.share)


class Loss(msgspec.Struct, frozen=True):
    """The cost of the end of one process."""

    what: str
    runs: float
    """Number of runs that wait, or begin their attempt again."""
    waits_s: float
    """Maximum wait."""
    then_s: float
    """Further time until the backlog is worked off."""


def losses(plan: Plan, costs: Costs) -> Iterator[Loss]:
    """The losses in the fluid model: the backlog while no worker runs, and the rate at which full batches reduce it
    afterwards.
    """
    shape, open_runs = plan.shape, plan.rate / PACE
    for kind, count in (("normalizer", shape.normalizers), ("parser", shape.parsers)):
        left = max(1, count - 1)
        then = _worked_off(plan.rate / count, plan.rate / left, costs, kind, TAKE_OVER_S)
        yield Loss(f"a {kind} dies", open_runs / count, TAKE_OVER_S, then)
    yield Loss("a fetcher dies", open_runs / shape.fetchers, FETCHER_LOST_S, 0.0)
    rate = plan.rate / shape.nodes
    then = _worked_off(rate, rate, costs, "server", FAIL_OVER_S)
    yield Loss("a server node fails over", open_runs / shape.nodes, FAIL_OVER_S, then)


def _worked_off(gathers: float, rate: float, costs: Costs, kind: str, seconds: float) -> float:
    """Time until the backlog is worked off. ``gathers``: chunks a second that wait; ``rate``: new ones of a process
    that works them off at the same time. A run's chunks of a batch are one item.
    """
    cost = costs.processes[kind]
    fastest = 1e6 / (cost.chunk_us + cost.item_us / JOINED)
    return gathers * seconds / max(fastest - rate, 0.05 * fastest)


def killed(plan: Plan, costs: Costs, kind: str, *, at: float = 1.0, seconds: float = 9.0) -> Loss:
    """The same event by event: the first worker of a stage dies, of two at least."""
    shape = plan.shape
    shape = msgspec.structs.replace(shape, normalizers=max(2, shape.normalizers), parsers=max(2, shape.parsers))
    deployment = Deployment(shape, costs, seed=SEED)
    runs = arriving(seconds, plan.rate, seed=SEED, pace=PACE, chunks=CHUNKS, burst=BURST, hot=HOT_SHARE)
    deployment.feed(runs)
    deployment.kill(kind, at, take_over_s=TAKE_OVER_S)
    outcome = deployment.run(seconds)
    late = [(written_at, wait, run) for written_at, wait, run in outcome.received if wait > 1.0]
    if not late:
        return Loss(f"a {kind} dies", 0, 0, 0)
    over = max(written_at + wait for written_at, wait, _ in outcome.received if wait > 0.1) - at - TAKE_OVER_S
    return Loss(f"a {kind} dies", len({run for _, _, run in late}), max(wait for _, wait, _ in late), over)


class Cells(msgspec.Struct, frozen=True):
    """Many cells of one kind."""

    count: int
    rate: float
    """All cells together."""
    mean: float
    hottest: float
    """Chunks a second of the busiest cell, three standard deviations above the mean."""


def cells(rate: float, most: float) -> Cells:
    """The smallest number of cells of which the hottest has no more than ``most``, if a hash of the conversation
    selects the cell.

    A run's chunks come from it alone, so a cell's rate varies as its number of open runs does; hot runs weigh twenty.
    """
    count = ceil(rate / most)
    while True:
        mean = rate / count
        spread = sqrt((1 - HOT_SHARE) * mean * PACE + HOT_SHARE * mean * PACE * 20)
        hottest = mean + 3 * spread
        if hottest <= most:
            return Cells(count, rate, mean, hottest)
        count = ceil(count * max(1.01, hottest / most))


class Grown(msgspec.Struct, frozen=True):
    """A larger Cluster, simulated event by event: the fluid model says that nothing but its size changes."""

    times: int
    plan: Plan


def grown(plan: Plan, costs: Costs, times: int) -> Grown:
    """The plan with this multiple of the rate, workers, nodes and partitions."""
    s = plan.shape
    shape = msgspec.structs.replace(
        s,
        fetchers=s.fetchers * times,
        normalizers=s.normalizers * times,
        parsers=s.parsers * times,
        nodes=s.nodes * times,
        subscribers=s.subscribers * times,
    )
    shape = _with_partitions(msgspec.structs.replace(shape, partitions=s.partitions * times))
    outcome = simulate(shape, costs, plan.rate * times)
    return Grown(times, _plan(f"{plan.rate * times:,.0f} chunks/s, Cluster", plan.rate * times, shape, outcome))


class Larger(msgspec.Struct, frozen=True):
    """The model's results for deployments that were not measured."""

    small: Plan
    cell: Plan
    cluster: Plan
    grown: list[Grown]
    cells: list[Cells]
    bounds: dict[float, list[Bound]]
    """The bounds of one Cluster, by chunks a second."""
    losses: dict[str, list[Loss]]
    """By name of the plan."""
    killed: list[Loss]
    """Losses of the small deployment with two of each stage, event by event."""


def larger(costs: Costs) -> Larger:
    """Simulate all of them."""
    small = sized("10,000 chunks/s, one server", costs, 10_000)
    one = cell(costs)
    cluster = _cluster(costs)
    return Larger(
        small=small,
        cell=one,
        cluster=cluster,
        grown=[grown(cluster, costs, times) for times in GROWN],
        cells=[cells(rate, one.rate) for rate in LARGE],
        bounds={rate: bounds(costs, cluster, rate) for rate in LARGE},
        losses={plan.name: list(losses(plan, costs)) for plan in (small, one, cluster)},
        killed=[killed(small, costs, kind) for kind in ("normalizer", "parser")],
    )


def table(found: Larger) -> str:
    """All results, for people."""
    one = found.cell
    plans = (found.small, one, found.cluster, *(each.plan for each in found.grown))
    lines = ["", "simulated event by event:", _HEAD, *map(_row, plans)]
    lines += ["", "as cells (fluid), each as the simulated one:"]
    for many in found.cells:
        s = one.shape
        each = s.fetchers + s.normalizers + s.parsers + s.nodes + s.subscribers
        lines.append(
            f"{many.rate / 1e6:g} M chunks/s: {many.count:,} cells, {many.mean:,.0f} chunks/s in the mean, the hottest"
            f" {many.hottest:,.0f}; {many.count * each:,} processes; {many.rate / CHUNKS:,.0f} runs begin a second;"
            f" p99 {one.p99_ms:.0f} ms; first to saturate: {one.first}"
        )
    for rate, of_rate in found.bounds.items():
        lines += ["", f"{rate / 1e6:g} M chunks/s as one Cluster (fluid), by share of the bound:"]
        lines += [
            f"  {bound.what:<52}{bound.needs:>12,.2f} of {bound.most:>7,.0f}  {bound.share:>8.2f}"
            f"{'  breaks' if bound.share > 1 else ''}"
            for bound in of_rate
        ]
    lines += ["", "what the end of one process costs:"]
    lines += [f"  {name}: {_loss(loss)}" for name, of_plan in found.losses.items() for loss in of_plan]
    lines += [f"  {found.small.name}, two of each stage, event by event: {_loss(loss)}" for loss in found.killed]
    return "\n".join(lines)


def of_cluster(costs: Costs, times: int) -> str:
    """A Cluster, and one of this multiple of its size, event by event."""
    plan = _cluster(costs)
    return "\n".join([_HEAD, _row(plan), _row(grown(plan, costs, times).plan)])


def _cluster(costs: Costs) -> Plan:
    return sized(f"{CLUSTER_RATE:,.0f} chunks/s, Cluster", costs, CLUSTER_RATE, cluster=True)


_HEAD = (
    f"{'':<30}{'fetchers':>9}{'norm.':>7}{'parsers':>8}{'nodes':>6}{'gatew.':>7}{'partit.':>8}{'p50':>9}{'p99':>9}"
    f"{'CPU':>8}  busiest"
)


def _row(plan: Plan) -> str:
    s = plan.shape
    name = plan.name if "chunks/s" in plan.name else f"{plan.name}: {plan.rate:,.0f} chunks/s"
    busy = ", ".join(f"{kind} {share:.0%}" for kind, share in sorted(plan.busiest.items(), key=lambda each: -each[1]))
    return (
        f"{name:<30}{s.fetchers:>9}{s.normalizers:>7}{s.parsers:>8}{s.nodes:>6}{s.subscribers:>7}{s.partitions:>8}"
        f"{plan.p50_ms:>6.1f} ms{plan.p99_ms:>6.1f} ms{plan.cpu_us:>5.0f} µs  {busy}"
    )


def _loss(loss: Loss) -> str:
    then = f", worked off {loss.then_s:.1f} s after" if loss.then_s else ", then begin their attempt again"
    return f"{loss.what}: {loss.runs:,.0f} runs wait up to {loss.waits_s:.1f} s{then}"
