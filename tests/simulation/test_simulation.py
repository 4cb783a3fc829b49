"""The model: it repeats, loses nothing, batches under load, and its page shows the stored predictions."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from tests.simulation import storage
from tests.simulation.compare import near
from tests.simulation.costs import Costs, ProcessCost
from tests.simulation.deployment import Deployment, Outcome, Shape, arriving, even
from tests.simulation.engine import TICK_S, Clock, Done, Host, Machine, Process
from tests.simulation.fit import GATEWAY, by_process, cpu_of, least_squares, pairs, simulated, summed
from tests.simulation.measurement import Case, Pair, stored
from tests.simulation.pages import MEASUREMENTS, predictions, section_of
from tests.simulation.scale import Plan, bounds, cells, losses, simulate

KINDS = ("provider", "fetcher", "normalizer", "parser", "server", "subscriber")
COSTS = Costs(processes=dict.fromkeys(KINDS, ProcessCost(turn_us=100, cold_us=0, item_us=20, chunk_us=5)), hop_us=50)
TWO = Shape(normalizers=2, parsers=2)


def outcome(shape: Shape, runs: int, pace: float, chunks: int) -> Outcome:
    deployment = Deployment(shape, COSTS)
    deployment.feed(even(runs, pace, chunks))
    return deployment.run(60)


def test_the_page_says_what_a_rate_needs_of_memory_disk_and_network() -> None:
    assert storage.table() in (MEASUREMENTS.parents[1] / "operate" / "scale.md").read_text()
    one, ten = storage.needs(1_000), storage.needs(10_000)
    assert ten.logs == 10 * one.logs
    assert ten.topics == one.topics  # both have reached the bound in entries


def test_a_seed_gives_the_same_events_each_time() -> None:
    assert simulate(TWO, COSTS, 500).received == simulate(TWO, COSTS, 500).received


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
    received = outcome(shape, 9, pace, 40).received
    assert Counter(run for _, _, run in received) == dict.fromkeys(range(9), 40)
    for run in range(9):
        written_at = [at for at, _, of in received if of == run]
        assert written_at == sorted(written_at)


def test_batches_grow_with_load_so_a_chunk_costs_less() -> None:
    slow, fast = outcome(Shape(local=True, cores=2), 4, 50, 40), outcome(Shape(local=True, cores=2), 64, 0, 100)
    assert fast.cpu_us["parser"] < slow.cpu_us["parser"] / 4
    assert fast.wait_ms(0.5) > slow.wait_ms(0.5)


def test_a_dead_worker_holds_up_its_own_partitions_until_they_are_taken_over() -> None:
    deployment = Deployment(TWO, COSTS)
    deployment.feed(even(16, 50, 200))
    deployment.kill("parser", 1.0, take_over_s=1.5)
    received = deployment.run(60).received
    late = {run for _, wait, run in received if wait > 0.5}
    assert late
    assert {deployment.placing.partition(run) % 2 for run in late} == {0}
    assert 1.4 < max(wait for _, wait, _ in received) < 2.0
    assert all(wait < 0.1 for written_at, wait, _ in received if written_at > 3.0)


def test_runs_arrive_at_the_rate_that_is_asked_for() -> None:
    runs = arriving(4, 5_000, seed=1, pace=50, chunks=500, burst=5, hot=0.1)
    total = sum(
        max(0.0, min(4, end) - begin) * pace
        for begin, end, pace in zip(runs.begins, runs.ends, runs.paces, strict=True)
    )
    assert total / 4 == pytest.approx(5_000, rel=0.2)
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


KNOWN = Costs(
    processes={
        "provider": ProcessCost(60, 60, 0, 5, 300),
        "fetcher": ProcessCost(200, 200, 15, 7, 3_000),
        "normalizer": ProcessCost(180, 200, 10, 5, 1_500),
        "parser": ProcessCost(180, 200, 12, 4, 2_000),
        "server": ProcessCost(60, 60, 8, 2, 1_500),
        "subscriber": ProcessCost(120, 100, 6, 1, 100),
    },
    hop_us=80,
    cold_s=0.003,
)


def measured_by_the_model(runs: int, pace: float, chunks: int) -> Case:
    case = Case(runs=runs, pace=pace, chunks=chunks, p50_ms=1, p99_ms=1, cpu_us={})
    deployment, outcome = simulated(case, KNOWN, 2)
    return msgspec.structs.replace(case, cpu_us=cpu_of(deployment, outcome))


def test_micro_cases_give_costs_that_predict_a_load_they_do_not_hold() -> None:
    loads = [(1, 100, 100), (1, 400, 100), (1, 1_000, 100), (32, 300, 30), (16, 0, 300), (30, 50, 1)]
    costs = by_process([measured_by_the_model(*load) for load in loads], 2, [0.002])
    other = measured_by_the_model(16, 50, 40)
    deployment, outcome = simulated(other, costs, 2)
    assert summed(cpu_of(deployment, outcome)) == pytest.approx(summed(other.cpu_us), rel=0.15)


def test_a_start_and_an_end_of_a_run_are_paid_for_once() -> None:
    fetcher = KNOWN.processes["fetcher"]
    free = msgspec.structs.replace(fetcher, run_us=0.0)
    case = Case(runs=1, pace=100, chunks=40, p50_ms=1, p99_ms=1, cpu_us={})
    cpu_us = [
        cpu_of(*simulated(case, msgspec.structs.replace(KNOWN, processes={**KNOWN.processes, "fetcher": each}), 2))
        for each in (fetcher, free)
    ]
    assert 40 * (cpu_us[0]["fetcher"] - cpu_us[1]["fetcher"]) == pytest.approx(fetcher.run_us, rel=0.1)


class Worker(Process):
    """Works for this many seconds per message."""

    def __init__(self, clock: Clock, machine: Machine) -> None:
        super().__init__(clock, ProcessCost(0, 0, 0, 0), Host(machine, hop_s=0.0, sent_at=1.0))
        self.ended: list[float] = []

    def handle(self, messages: list[float]) -> tuple[int, int, float, Done]:
        return 0, 0, sum(messages), lambda: self.ended.append(self.clock.now)


def test_a_process_that_wakes_preempts_the_running_one_and_no_work_is_done_twice() -> None:
    clock = Clock()
    machine = Machine(clock, 1)
    first, second = Worker(clock, machine), Worker(clock, machine)
    clock.at(0.0, lambda: first.arrive(0.001))
    clock.at(0.0004, lambda: second.arrive(0.0002))
    clock.run(1)
    assert (second.ended, first.ended) == ([pytest.approx(0.0006)], [pytest.approx(0.0012)])


def test_a_process_waits_for_its_core_though_another_is_idle_until_the_next_tick() -> None:
    clock = Clock()
    machine = Machine(clock, 2)
    busy, other, late = (Worker(clock, machine) for _ in range(3))
    clock.at(0.0, lambda: busy.arrive(0.02))
    clock.at(0.0, lambda: other.arrive(0.001))
    clock.at(0.0005, lambda: late.arrive(0.02))
    clock.run(1)
    assert other.ended == [pytest.approx(0.001)]
    assert max(late.ended + busy.ended) == pytest.approx(TICK_S + 0.02, abs=TICK_S)


def test_runs_that_start_hold_up_the_chunks_of_the_others() -> None:
    def slowest(run_us: float) -> float:
        processes = {kind: msgspec.structs.replace(cost, run_us=run_us) for kind, cost in COSTS.processes.items()}
        deployment = Deployment(Shape(local=True, cores=2), msgspec.structs.replace(COSTS, processes=processes))
        deployment.feed(even(16, 50, 20))
        return deployment.run(60).wait_ms(0.99)

    assert slowest(6_000) > 1.5 * slowest(0)


def test_turns_that_vary_make_the_slowest_chunks_slower() -> None:
    def waits(jitter: float) -> Outcome:
        deployment = Deployment(Shape(local=True, cores=2), msgspec.structs.replace(KNOWN, jitter=jitter))
        deployment.feed(even(1, 100, 300))
        return deployment.run(60)

    assert waits(0.5).wait_ms(0.99) > 1.3 * waits(0).wait_ms(0.99)


def test_a_gateway_costs_what_a_gateway_costs() -> None:
    costs = msgspec.structs.replace(KNOWN, processes={**KNOWN.processes, GATEWAY: ProcessCost(500, 0, 50, 10)})
    deployment = Deployment(Shape(subscriber=GATEWAY, subscribers=2), costs)
    deployment.feed(even(9, 50, 20))
    found = deployment.run(60)
    assert "subscriber" not in found.cpu_us
    assert found.cpu_us[GATEWAY] > 300


def test_the_page_shows_the_predictions_that_are_stored() -> None:
    assert section_of("predictions", MEASUREMENTS) == predictions(stored())


@pytest.mark.parametrize(
    "pair",
    [
        pair
        for pair in stored().predicted
        if pair.name.endswith("CPU a chunk") or (pair.name.endswith("p50") and not pair.name.startswith("64 runs"))
    ],
    ids=lambda pair: pair.name,
)
def test_stored_predictions_of_cpu_and_of_the_median_latency_are_within_a_fifth(pair: Pair) -> None:
    assert near(pair), f"measured {pair.measured:.1f} {pair.unit}, predicted {pair.model:.1f} {pair.unit}"


def test_the_predictions_of_the_small_case_are_what_the_model_says_of_the_stored_costs() -> None:
    measured = stored()
    [case] = [case for case in measured.others if case.runs == 16]
    kept = [pair for pair in measured.predicted if pair.name.startswith(case.name + ":")]
    found = pairs([case], measured.costs, measured.cores)
    assert [pair.name for pair in found] == [pair.name for pair in kept]
    assert [pair.model for pair in found] == pytest.approx([pair.model for pair in kept])
