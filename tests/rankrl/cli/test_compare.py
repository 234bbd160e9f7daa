"""`task=compare`: the same terms for all selectors, one table, and an exact continuation after a kill."""

import csv
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import QUICK, call, read_json, small_network, workplace

from decomposition import CompressionPlan
from rankrl.bench import bench_task
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks.task_run import TaskRun, selector_entry
from rankrl.errors import ConfigError
from rankrl.options.search import CompareOptions, SearchOptions
from rankrl.plan_search import compare
from rankrl.plan_search.bounded_loss import SearchCall
from rankrl.plan_search.compare import compared_searches, search_all
from rankrl.plan_search.scores.evaluation import recorded_steps
from rankrl.plan_search.selectors import SelectorEntry, list_selectors, selector_class
from rankrl.plan_search.session import SearchSession
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.runs.run_folder import RunFolder

Command = Callable[..., None]
LOCAL = "local:step=0.4,plans_per_step=1"


def made_arguments(folder: Path) -> list[str]:
    """A comparison of some selectors on a network that is written to the folder."""
    return [
        *QUICK[1:],
        *small_network(folder),
        "task=compare",
        'compare.selectors=[random,greedy,"local:step=0.4,plans_per_step=1",uniform]',
        "compare.seeds=[3,4]",
        "decomposition=tucker",
        "budget.params=0.2",
        "search.metric=soft_agreement",
    ]


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return made_arguments(tmp_path)


@pytest.fixture(scope="session")
def whole(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """The folder of one finished comparison, for all tests to read."""

    def fill(folder: Path) -> None:
        with workplace(folder):
            call(*made_arguments(folder), f"hydra.run.dir={folder / 'run'}")

    return made_once("comparison", fill) / "run"


def rows(folder: Path) -> list[dict[str, str]]:
    """The rows of compare.csv without what the clock decides."""
    with (folder / "compare.csv").open(newline="") as file:
        return [
            {key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)
        ]


class Killed(BaseException):
    """Stands for the end of the process."""


def die_at(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """Let a function be the comparison's last one at its n-th call."""
    original, calls = getattr(owner, name), []

    def call(*positional: Any, **named: Any) -> Any:
        calls.append(name)
        if len(calls) == number:
            raise Killed
        return original(*positional, **named)

    patch.setattr(owner, name, call)


def test_a_comparison_has_a_row_for_every_search(whole: Path) -> None:
    found = rows(whole)
    assert [(row["selector"], row["seed"]) for row in found] == [
        ("random", "3"),
        ("random", "4"),
        ("greedy", ""),
        (LOCAL, "3"),
        (LOCAL, "4"),
        ("uniform", ""),
    ]
    assert [row["episodes"] for row in found] == ["3", "3", "1", "3", "3", "1"]
    assert all(0 <= float(row["finetuned_accuracy"]) <= 1 for row in found)
    metrics = read_json(whole / "metrics.json")
    assert metrics["compare"][LOCAL]["runs"] == 2
    assert metrics["compare"]["greedy"]["best_reward"]["std"] is None
    assert metrics["compare"]["greedy"]["best_reward"]["half_width"] is None
    assert metrics["compare"][LOCAL]["best_reward"]["half_width"] >= 0
    assert metrics["search"]["best_reward"] == max(float(row["best_reward"]) for row in found)
    for name in ("compare.md", "report.html", "plots/rewards.png", "plan.json"):
        assert (whole / name).stat().st_size > 0, name
    written = (whole / "compare.md").read_text()
    assert f"| {LOCAL} | 2 |" in written
    assert "| Selector | 1 plan | 3 plans |" in written
    assert (whole / "searches" / "local-step-0.4-plans_per_step-1-3" / "plan.json").exists()


@pytest.mark.slow
def test_a_comparison_goes_on_exactly_and_repeats_nothing(
    rankrl: Command, arguments: list[str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    with monkeypatch.context() as patch:
        die_at(patch, SearchSession, "search", 4)
        with pytest.raises(Killed):
            rankrl(*arguments, f"hydra.run.dir={broken}")
    with monkeypatch.context() as patch:
        die_at(patch, compare, "run_training", 2)
        with pytest.raises(Killed):
            rankrl(f"resume={broken}")
    assert not (broken / "metrics.json").exists()
    assert len(list((broken / "state" / "plans").glob("*.json"))) == 1
    rankrl(f"resume={broken}")
    assert rows(broken) == rows(whole)
    expected, found = (read_json(folder / "metrics.json")["compare"][LOCAL] for folder in (whole, broken))
    assert found["finetuned_accuracy"] == expected["finetuned_accuracy"]


def test_fine_tuning_can_be_left_out(rankrl: Command, arguments: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rankrl(*arguments, "finetune.epochs=0", "compare.selectors=[greedy]", f"hydra.run.dir={folder}")
    (row,) = rows(folder)
    assert row["finetuned_accuracy"] == ""
    assert "Fine-tuned" not in (folder / "compare.md").read_text()


def test_plans_need_not_be_applied_and_the_table_is_there_for_latex(
    rankrl: Command, arguments: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    asked = ["compare.apply=false", "compare.latex=true", "compare.selectors=[random,greedy]"]
    kept = [each for each in arguments if not each.startswith("finetune.")]
    rankrl(*kept, *asked, f"hydra.run.dir={folder}")
    assert {(row["test_accuracy"], row["finetuned_accuracy"]) for row in rows(folder)} == {("", "")}
    assert not (folder / "state" / "plans").exists()
    written = (folder / "compare.tex").read_text()
    assert re.search(r"(?m)^random & 2 & [\d.]+ \$\\pm\$ [\d.]+ & .* \\\\$", written)
    assert written.count("&") == written.count(r"\\") * written.splitlines()[-4].count("&")
    assert (folder / "plots" / "rewards.pdf").exists()
    metrics = read_json(folder / "metrics.json")
    assert (metrics["search"]["reward"], metrics["search"]["metric"]) == ("accuracy", "soft_agreement")
    assert metrics["dense_int8"] is None
    assert "reward accuracy, metric soft_agreement, budget params 0.2" in (folder / "report.html").read_text()


def _compared(config: AppConfig) -> list[SelectorEntry]:
    return TaskRun(config, RunFolder(Path("run"))).compared_selectors()


def test_each_selector_has_the_options_of_its_file() -> None:
    config = AppConfig(
        selector={"name": "ddpg", "noise": 0.7}, compare=CompareOptions(tuple(list_selectors()), (0,))
    )
    found = {each.text: each.options for each in _compared(config)}
    assert found["ddpg"] == {"noise": 0.7}
    for name in ("local", "random", "tpe", "greedy"):
        assert set(found[name]) == set(selector_class(name).default_options())


def test_an_entry_may_set_options_over_those_of_the_command_line() -> None:
    entries = ["bayes", "bayes:candidates=64,step=0.4", "local:step=0.5"]
    config = AppConfig(selector={"name": "bayes", "step": 0.2}, compare=CompareOptions(tuple(entries), (0,)))
    plain, narrow, local = _compared(config)
    assert plain.options == {"step": 0.2}
    assert narrow.options == {"step": 0.4, "candidates": 64}
    assert local.options == {**selector_class("local").default_options(), "step": 0.5}
    assert {each.text for each in (plain, narrow, local)} == set(entries)


def test_selectors_that_draw_nothing_run_once() -> None:
    entered = compared_searches([selector_entry(name) for name in list_selectors()], [5, 6])
    once = {each.entry.selector for each in entered if each.seed is None}
    assert once == {"divergence", "energy", "greedy", "uniform", "vbmf"}
    assert len(entered) == len(once) + 2 * (len(list_selectors()) - len(once))
    assert len({each.folder_name for each in entered}) == len(entered)


@pytest.mark.parametrize(
    ("selectors", "message"),
    [
        (["ddgp"], "compare.selectors: there is no selector 'ddgp'.*Did you mean 'ddpg'"),
        (["greedy", "greedy"], "names 'greedy' twice"),
        (["local:step"], "compare.selectors: 'local:step' is no selector with options"),
        (["local:stepp=1"], "compare.selectors: .*has no option .stepp."),
    ],
)
def test_bad_selectors_are_refused(selectors: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _compared(AppConfig(selector={"name": "ddpg"}, compare=CompareOptions(tuple(selectors))))


@pytest.mark.parametrize(("seeds", "message"), [([], "at least one"), ([1, 1], "different"), ([-1], ">= 0")])
def test_bad_seeds_are_refused(seeds: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compared_searches([selector_entry("random")], seeds)


TASKS = ["lenet5 tucker params 0.025", "conv4 tucker params 0.04"]


def test_tables_are_searched_by_name_and_end_in_the_same_page(
    rankrl: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    asked = (f"bench=[{','.join(TASKS)}]", "compare.selectors=[random,greedy,energy]", "compare.latex=true")
    rankrl("task=compare", *asked, "compare.seeds=[3,4]", "search.episodes=3", f"hydra.run.dir={folder}")
    found = rows(folder)
    assert [(row["task"], row["selector"], row["seed"]) for row in found] == [
        (task, *search) for task in TASKS for search in (("random", "3"), ("random", "4"), ("greedy", ""))
    ]
    for row in found:
        task = bench_task(row["task"])
        own = (
            folder
            / "searches"
            / row["task"].replace(" ", "_")
            / f"{row['selector']}-{row['seed']}".strip("-")
        )
        steps = recorded_steps((own / "episodes.csv").read_bytes().decode())
        best = max((each for step in steps for each in step), key=lambda each: each.reward)
        assert float(row["best_reward"]) == task.score(best.key)
        assert float(row["regret"]) == task.regret(best.key) >= 0
        assert CompressionPlan.load(own / "plan.json") == task.plan(best.key, row["selector"])
    metrics = read_json(folder / "metrics.json")
    greedy = [float(row["regret"]) for row in found if row["selector"] == "greedy"]
    assert metrics["compare"]["greedy"]["regret"]["mean"] == pytest.approx(sum(greedy) / 2)
    assert (metrics["bench"], metrics["compare"]["random"]["runs"]) == (TASKS, 2)
    assert metrics["warnings"] == ["left out, as they look at weights, which tables lack: energy"]
    page = (folder / "report.html").read_text()
    assert "Selectors compared: 2 tasks on RankBench" in page
    assert re.findall(r"<th[^>]*>((?:lenet5|conv4) [^<]*)</th>", page) == TASKS
    assert "Regret, points" in (folder / "compare.tex").read_text()
    (folder / "metrics.json").unlink()
    rankrl(f"resume={folder}")
    assert rows(folder) == found


@pytest.mark.parametrize(
    ("bench", "message"),
    [
        (
            "conv4 tucker params 0.4",
            "no task 'conv4 tucker params 0.4'.*Did you mean 'conv4 tucker params 0.04'",
        ),
        ("transformer tensor_train macs 0.4", "scores plans that its table lacks"),
        ("[]", r"none of the tasks \[\] scores plans"),
    ],
)
def test_tables_that_cannot_be_searched_are_refused(
    refused: Callable[..., str], bench: str, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    said = refused("task=compare", f"bench={bench}", "compare.selectors=[random]", f"hydra.run.dir={folder}")
    assert re.search(message, said)
    assert not folder.exists()


def test_selectors_that_need_weights_do_not_search_tables(refused: Callable[..., str]) -> None:
    said = refused("task=compare", f"bench={TASKS[0]}", "compare.selectors=[energy,divergence]")
    assert "no table has the weights that energy, divergence look at" in said


def test_an_interrupted_search_stops_the_comparison(small_problem: SearchProblem) -> None:
    calls = []

    def search(call: SearchCall) -> Any:
        calls.append(call)
        return SimpleNamespace(stopped_by="interrupt")

    with pytest.raises(KeyboardInterrupt):
        search_all(
            small_problem, SearchOptions(), search, compared_searches([selector_entry("random")], [0, 1])
        )
    assert len(calls) == 1


def test_wrong_options_are_refused_before_anything_is_searched(
    arguments: list[str], refused: Callable[..., str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    message = refused(*arguments, "selector=random", "selector.plans_per_step=0", f"hydra.run.dir={folder}")
    assert "selector.plans_per_step" in message
    assert not (folder / "searches").exists()
