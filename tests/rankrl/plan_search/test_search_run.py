"""The search loop stops when it should and returns the best plan."""

import csv
import json
import os
import re
import signal
from dataclasses import replace

import pytest

from decomposition import CandidateSet, Factorise
from decomposition.choose.budget import Budget
from decomposition.choose.candidates import Candidate
from decomposition.network.layers import LayerSpec
from decomposition.operations import Cost, operation_from_dict
from decomposition.progress import Deadline
from rankrl.errors import CheckpointError, ConfigError, StorageError
from rankrl.plan_search.run import ChosenPlan, layer_costs, run_search, search_numbers
from rankrl.plan_search.scores.evaluation import (
    CANDIDATES_FILE,
    EPISODES_FILE,
    best_rows,
    parse_rows,
    recorded_steps,
)
from rankrl.plan_search.selectors import create_selector
from rankrl.plan_search.selectors.selector import Proposal
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.report import LayerRow, RunReport, run_page


def press_ctrl_c() -> None:
    """Call what handles SIGINT now: a real signal might end the process that runs the tests."""
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler)
    handler(signal.SIGINT, None)


def search(problem, evaluator, episodes=12, **options):
    selector = create_selector("random", problem, seed=1, episodes=episodes)
    return run_search(problem, evaluator, selector, episodes=episodes, **options)


def test_the_best_plan_wins(small_problem, synthetic_evaluator) -> None:
    result = search(small_problem, synthetic_evaluator)
    assert len(result.rows) == 12
    assert result.stopped_by == "episodes"
    assert result.best.reward == max(row.reward for row in result.rows) == result.rows[-1].best_reward
    assert result.row == result.best
    assert result.plan == small_problem.plan(result.best.key, "random")
    assert result.plan.chosen_by == "random"
    assert small_problem.keeps_budget(result.best.key)
    assert result.evaluations == synthetic_evaluator.calls


def proposing(problem, *plans):
    """A selector that proposes these plans, again and again."""
    selector = create_selector("random", problem)
    selector.propose = lambda: [Proposal(plans[selector.observed % len(plans)], "random")]
    return selector


def test_a_plan_over_the_budget_is_scored_and_never_the_best(
    small_problem, synthetic_evaluator, tmp_path, caplog
) -> None:
    dense, small = tuple(site.dense for site in small_problem.sites), small_problem.preset
    selector = proposing(small_problem, dense, small, dense)
    found = run_search(small_problem, synthetic_evaluator, selector, episodes=3, folder=tmp_path)
    assert "2 of 3 plans that selector 'random' proposed are over the budget params 0.5" in caplog.text
    first, second, third = found.rows
    assert first.reward == third.reward > second.reward
    assert found.best == found.row == second == best_rows(found.rows, 3)[0]
    assert found.key == tuple(small)
    assert [row.best_reward for row in found.rows] == [first.reward, second.reward, second.reward]
    recorded = parse_rows((tmp_path / EPISODES_FILE).read_text())
    assert [row.within_budget for row in recorded] == [False, True, False]
    caplog.clear()
    search(small_problem, synthetic_evaluator)
    assert "over the budget" not in caplog.text
    with pytest.raises(ConfigError, match=r"2 of 2 plans that selector 'random' .* budget params 0\.5"):
        run_search(small_problem, synthetic_evaluator, proposing(small_problem, dense), episodes=2)


@pytest.mark.parametrize(
    ("proposed", "message"),
    [
        (None, "propose must return a list of Proposal, got null"),
        ([(0, 0)], "propose must return a list of Proposal"),
        ([Proposal((0,), "random")], r"RandomSelector\.propose: a plan has \d choices.*greedy's is"),
        ([Proposal((0.5, 0, 0), "random")], "a plan has"),
    ],
)
def test_what_is_no_plan_is_refused(small_problem, synthetic_evaluator, proposed, message) -> None:
    selector = create_selector("random", small_problem)
    selector.propose = lambda: proposed
    with pytest.raises(ConfigError, match=message):
        run_search(small_problem, synthetic_evaluator, selector, episodes=2)


def test_the_best_rows_are_different_plans_in_order(small_problem, synthetic_evaluator) -> None:
    rows = search(small_problem, synthetic_evaluator, episodes=30).rows
    best = best_rows(rows, 5)
    assert len({row.key for row in best}) == 5
    assert [row.reward for row in best] == sorted((row.reward for row in best), reverse=True)


def test_patience_stops_a_search_that_no_longer_improves(small_problem, synthetic_evaluator) -> None:
    result = search(small_problem, synthetic_evaluator, episodes=500, patience=5)
    assert result.stopped_by == "patience"
    assert len(result.rows) == result.best.episode + 5


@pytest.mark.parametrize("selector", ["random", "cmaes", "ddpg"])
def test_a_limit_of_plans_counts_different_ones(
    small_problem, synthetic_evaluator, selector, tmp_path
) -> None:
    def run(plans=None, folder=None):
        synthetic_evaluator.restore({})
        chosen = create_selector(selector, small_problem, seed=1, episodes=30)
        return run_search(
            *(small_problem, synthetic_evaluator, chosen),
            episodes=30,
            plans=plans,
            folder=folder,
            resume=True,
        )

    whole = run()
    count = whole.plans - 1
    limited = run(count)
    assert limited.plans == limited.evaluations == count > 1
    assert limited.stopped_by == "plans"
    keys = [row.key for row in limited.rows]
    assert keys == [row.key for row in whole.rows[: len(keys)]]
    assert len(set(keys[:-1])) == count - 1
    run(count, tmp_path)
    record = tmp_path / EPISODES_FILE
    record.write_bytes(b"".join(record.read_bytes().splitlines(keepends=True)[: len(keys) // 2]))
    assert [row.key for row in run(count, tmp_path).rows] == keys
    with pytest.raises(CheckpointError, match="plans was"):
        run(2, tmp_path)


def test_plans_that_were_scored_before_can_be_the_best(small_problem, synthetic_evaluator) -> None:
    first, again = (search(small_problem, synthetic_evaluator, episodes=20, patience=9) for _ in range(2))
    assert again.rows[0].cached
    assert again.best.key == first.best.key
    assert again.stopped_by == first.stopped_by


def test_time_stops_a_search(small_problem, synthetic_evaluator) -> None:
    deadline = Deadline(0.1)
    result = search(small_problem, synthetic_evaluator, episodes=100_000, deadline=deadline)
    assert result.stopped_by == "seconds"
    assert deadline.elapsed >= 0.1
    assert len(result.rows) < 100_000


def test_a_search_that_time_ended_goes_on_with_more_of_it_alone(
    small_problem, synthetic_evaluator, tmp_path
) -> None:
    """One step is scored however little time there is; the rest of the call is told to end, too."""
    first = search(small_problem, synthetic_evaluator, folder=tmp_path, deadline=Deadline(1e-9))
    assert first.stopped_by == "seconds"
    assert len(first.rows) == 1
    again = Deadline(1e-9)
    assert (
        search(small_problem, synthetic_evaluator, folder=tmp_path, resume=True, deadline=again).key
        == first.key
    )
    assert again.stopped
    rest = search(small_problem, synthetic_evaluator, folder=tmp_path, resume=True, deadline=Deadline(1e9))
    assert (rest.stopped_by, len(rest.rows)) == ("episodes", 12)


def test_ctrl_c_finishes_the_episode_and_saves(small_problem, synthetic_evaluator, tmp_path, capsys) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def interrupt(row) -> None:
        seen.append(row)
        if row.episode == 3:
            press_ctrl_c()

    result = search(small_problem, synthetic_evaluator, folder=tmp_path, on_episode=interrupt)
    assert result.stopped_by == "interrupt"
    assert len(result.rows) == len(seen) == 3
    assert "Finishing this episode" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    resumed = search(small_problem, synthetic_evaluator, folder=tmp_path, resume=True)
    assert resumed.stopped_by == "episodes"
    assert len(resumed.rows) == 12


def test_a_second_ctrl_c_stops_at_once(small_problem, synthetic_evaluator) -> None:
    def interrupt(row) -> None:
        press_ctrl_c()
        press_ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        search(small_problem, synthetic_evaluator, on_episode=interrupt)


def test_a_full_disk_keeps_the_steps_before(
    small_problem, synthetic_evaluator, tmp_path, monkeypatch
) -> None:
    def full(row) -> None:
        if row.episode == 4:

            def write(descriptor: int) -> None:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(os, "fsync", write)

    with pytest.raises(StorageError, match="No space left"):
        search(small_problem, synthetic_evaluator, folder=tmp_path, on_episode=full)
    monkeypatch.undo()
    assert len(recorded_steps((tmp_path / EPISODES_FILE).read_bytes().decode())) >= 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "candidates.json",
        "episodes.csv",
        "search.json",
    ]
    whole = search(small_problem, synthetic_evaluator)
    resumed = search(small_problem, synthetic_evaluator, folder=tmp_path, resume=True)
    assert [row.key for row in resumed.rows] == [row.key for row in whole.rows]


@pytest.mark.parametrize("limits", [{"episodes": 0}, {"patience": -1}, {"plans": 0}])
def test_limits_out_of_range_are_refused(small_problem, synthetic_evaluator, limits) -> None:
    selector = create_selector("random", small_problem)
    with pytest.raises(ConfigError, match=next(iter(limits))):
        run_search(small_problem, synthetic_evaluator, selector, **{"episodes": 3, **limits})


def test_a_file_says_what_the_choices_stand_for(small_problem, synthetic_evaluator, tmp_path) -> None:
    result = search(small_problem, synthetic_evaluator, folder=tmp_path)
    content = json.loads((tmp_path / CANDIDATES_FILE).read_text())
    assert tuple(content) == small_problem.names
    for site in small_problem.sites:
        for candidate, entry in zip(site.candidates, content[site.name], strict=True):
            read = tuple(operation_from_dict(each, "the file") for each in entry["operations"])
            assert read == candidate.operations
            assert (entry["params"], entry["macs"]) == (candidate.cost.params, candidate.cost.macs)
            assert entry["time"] is None
            assert entry["error"] == candidate.error
    with (tmp_path / EPISODES_FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, expected in zip(rows, result.rows, strict=True):
        choices = json.loads(row["choices"])
        assert tuple(choices) == expected.key
        kept = small_problem.cost(choices).params / small_problem.params
        assert float(row["params_kept"]) == kept == expected.params_kept


def site(name: str, importance: float, *, times: bool) -> CandidateSet:
    spec = LayerSpec(name, 0, "linear", 10, 10, (), (), 1, False)  # type: ignore[arg-type]
    small = Candidate((Factorise("cp", (1,)),), Cost(20, 30, 80, 0.5 if times else None), 0.2, "cp")
    return CandidateSet(
        spec, (small, Candidate((), Cost(100, 120, 400, 2.0 if times else None), 0.0)), importance
    )


@pytest.mark.parametrize("times", [False, True])
def test_losses_and_savings_are_those_of_the_choices(times: bool) -> None:
    sites = tuple(site(name, weight, times=times) for name, weight in (("a", 1.0), ("b", 3.0), ("c", 2.0)))
    measure, total = ("latency", 10.0) if times else ("params", 400.0)
    budget = Budget.of_total(total, sites, measure, 1.0)
    problem = SearchProblem(tuple(each.spec for each in sites), sites, (3,), 400, 400, budget)
    layers = layer_costs(problem, (0, 0, 1))
    assert [each.name for each in layers] == ["b", "a"]
    assert [each.loss for each in layers] == pytest.approx([3 * 0.04, 0.04])
    assert {(each.saved_params, each.saved_macs) for each in layers} == {(80, 90)}
    assert [each.saved_time for each in layers] == ([0.15, 0.15] if times else [None, None])
    both = (
        replace(problem, budget=replace(Budget.of_total(400.0, sites, "params", 1.0), also=budget))
        if times
        else problem
    )
    assert layer_costs(both, (0, 0, 1)) == layers
    chosen = ChosenPlan(plan=both.plan((0, 0, 1), "greedy"), key=(0, 0, 1), layers=layers)
    row = LayerRow("b", (10, 10), (1,), 100, 20, 120, 30)
    cells = set(re.findall(r"<t[hd][^>]*>([^<]*)", run_page(RunReport(search_numbers(chosen), [row]))))
    assert {"Share of the loss", "75.0\N{NO-BREAK SPACE}%"} <= cells
    assert ("Time saved" in cells) == times
    assert search_numbers(replace(chosen, layers=())) == {}
