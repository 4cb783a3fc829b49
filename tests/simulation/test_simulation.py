"""The model: it repeats, loses nothing, batches under load, and says of the small case what was measured."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.compare import NEAR, of_cases, of_small
from tests.simulation.costs import Costs, ProcessCost
from tests.simulation.deployment import Deployment, Outcome, Shape, arriving, even
from tests.simulation.fit import least_squares
from tests.simulation.measurement import SmallFigure, stored
from tests.simulation.scale import Plan, bounds, cells, losses, simulate

KINDS = ("provider", "fetcher", "normalizer", "parser", "server", "subscriber")
COSTS = Costs(processes=dict.fromkeys(KINDS, ProcessCost(wake_us=100, cold_us=0, item_us=20, chunk_us=5)), hop_us=50)
TWO = Shape(normalizers=2, parsers=2)


def outcome(shape: Shape, runs: int, pace: float, chunks: int) -> Outcome:
    deployment = Deployment(shape, COSTS)
    deployment.feed(even(runs, pace, chunks))
    return deployment.run(60)


def test_a_seed_gives_the_same_events_each_time() -> None:
    assert simulate(TWO, COSTS, 500).heard == simulate(TWO, COSTS, 500).heard


@pytest.mark.parametrize(
    ("shape", "pace"),
    [
        pytest.param(Shape(local=True, cores=2), 0, id="one machine, saturated"),
        pytest.param(Shape(local=True, cores=2), 50, id="one machine"),
        pytest.param(TWO, 50, id="one server"),
        pytest.param(Shape(nodes=3, cluster=True, fetchers=2, parsers=2), 50, id="a Cluster"),
    ],
)
def test_every_chunk_arrives_once_and_in_its_run_s_order(shape: Shape, pace: float) -> None:
    heard = outcome(shape, 9, pace, 40).heard
    assert Counter(run for _, _, run in heard) == dict.fromkeys(range(9), 40)
    for run in range(9):
        born = [at for at, _, of in heard if of == run]
        assert born == sorted(born)


def test_batches_grow_with_load_so_a_chunk_costs_less() -> None:
    slow, fast = outcome(Shape(local=True, cores=2), 4, 50, 40), outcome(Shape(local=True, cores=2), 64, 0, 100)
    assert fast.cpu_us["parser"] < slow.cpu_us["parser"] / 4
    assert fast.wait_ms(0.5) > slow.wait_ms(0.5)


def test_a_dead_worker_holds_up_its_own_partitions_until_they_are_taken_over() -> None:
    deployment = Deployment(TWO, COSTS)
    deployment.feed(even(16, 50, 200))
    deployment.kill("parser", 1.0, take_over_s=1.5)
    heard = deployment.run(60).heard
    late = {run for _, wait, run in heard if wait > 0.5}
    assert late
    assert {deployment.placing.partition(run) % 2 for run in late} == {0}
    assert 1.4 < max(wait for _, wait, _ in heard) < 2.0
    assert all(wait < 0.1 for born, wait, _ in heard if born > 3.0)


def test_runs_arrive_at_the_rate_that_is_asked_for() -> None:
    runs = arriving(4, 5_000, seed=1, pace=50, chunks=500, burst=5, hot=0.1)
    said = sum(
        max(0.0, min(4, end) - begin) * pace
        for begin, end, pace in zip(runs.begins, runs.ends, runs.paces, strict=True)
    )
    assert said / 4 == pytest.approx(5_000, rel=0.2)
    assert {50.0, 1_000.0} == set(runs.paces)


def test_unit_costs_are_found_again_in_what_they_explain() -> None:
    rows = [[2, 0.5, 3], [1, 0, 2], [0.1, 0, 1], [0.01, 0, 0.2]]
    wanted = [sum(cost * count for cost, count in zip((100, 20, 5), row, strict=True)) for row in rows]
    assert least_squares(rows, wanted) == pytest.approx([100, 20, 5], rel=0.01)


def test_a_cost_is_never_negative() -> None:
    assert min(least_squares([[1, 1], [1, 2]], [3, 1])) >= 0


def test_the_hottest_of_many_cells_has_room() -> None:
    found = cells(1e6, 50_000)
    assert found.mean * found.count == pytest.approx(1e6)
    assert found.mean < found.hottest <= 50_000


def test_what_breaks_a_cluster_first_is_named_first() -> None:
    shape = Shape(fetchers=4, normalizers=2, parsers=2, nodes=2, partitions=16, cluster=True)
    plan = Plan("", 1e5, shape, 1, 1, {"normalizer": 0.5, "parser": 0.5, "server": 0.5}, 1)
    shares = [bound.share for bound in bounds(COSTS, plan, 5e7)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 1
    assert max(bound.share for bound in bounds(COSTS, plan, 1e5)) < 1


def test_a_node_s_loss_concerns_its_share_of_the_runs() -> None:
    shape = Shape(fetchers=4, normalizers=2, parsers=2, nodes=4, partitions=16, cluster=True)
    plan = Plan("", 1e4, shape, 1, 1, {}, 1)
    *_, node = losses(plan, COSTS)
    assert node.runs == 1e4 / 50 / 4
    assert node.then_s > 0


@pytest.mark.parametrize(
    "figure", stored().small.figures, ids=lambda each: f"{each.runs} at {each.pace:g}, {each.what}"
)
def test_the_model_is_within_a_fifth_of_the_small_case(figure: SmallFigure) -> None:
    assert abs(of_small(figure, stored()).off) <= NEAR


def test_the_model_is_within_a_third_of_what_a_busy_machine_did_at_saturation() -> None:
    saturated = [pair for pair in of_cases(stored()) if "saturated" in pair.name]
    assert len(saturated) == 4
    assert [f"{pair.name}: {pair.off:+.0%}" for pair in saturated if abs(pair.off) > 1 / 3] == []
