"""RankBench: tables of plans answer as the search that made them would, and say so where they cannot."""

import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import rankbench
import torch
import train_agent
from bench_frame import ResultRows
from gymnasium.utils.env_checker import check_env
from scipy.stats import spearmanr
from sklearn.ensemble import ExtraTreesRegressor
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3
from torch import nn

from decomposition.choose.budget import LatencyTable
from rankrl.bench import BenchTask, Surrogate, Table, bench_task, bench_tasks, write_tables
from rankrl.bench.task import answering_tasks
from rankrl.errors import ConfigError
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.plan_search.space.problem_file import problem_from_json, problem_to_json

NAME, OTHER = "small tucker params 0.5", "small tucker params 0.7"


def any_plan(problem: SearchProblem, generator: np.random.Generator) -> tuple[int, ...]:
    """Draw a plan of a small problem, within its budget or not: few keep it."""
    return tuple(int(generator.integers(len(site))) for site in problem.sites)


@pytest.fixture(scope="module")
def table(small_problem: SearchProblem) -> Table:
    """Plans whose score is one minus a weighted sum of their losses, with an interaction of neighbours."""
    generator = np.random.default_rng(0)
    plans = [tuple(small_problem.preset.tolist())]
    while len(plans) < 150:
        plan = any_plan(small_problem, generator)
        if plan not in plans:
            plans.append(plan)
    choices = np.array(plans)
    losses = [site.losses[plan] for site, plan in zip(small_problem.sites, choices.T, strict=True)]
    roots = np.sqrt(np.stack(losses, axis=1))
    judged = 1 - roots**2 @ np.linspace(0.5, 1.5, roots.shape[1]) - roots[:, 0] * roots[:, 1]
    scores = judged + 1e-3 * generator.standard_normal(len(judged))
    sources = ("greedy", *["random"] * (len(plans) - 1))
    return Table(NAME, "small", "small", small_problem, choices, sources, scores, judged)


@pytest.fixture(scope="module")
def task(table: Table) -> BenchTask:
    return BenchTask(table)


@pytest.fixture
def file(table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of two tasks in the folder RANKRL_DATA."""
    path = tmp_path / "rankbench.zip"
    write_tables([table, replace(table, name=OTHER, family="other")], path)
    monkeypatch.setenv("RANKRL_DATA", str(tmp_path))
    return path


def unknown_plan(table: Table) -> tuple[int, ...]:
    generator = np.random.default_rng(1)
    while True:
        plan = any_plan(table.problem, generator)
        if plan not in table.rows:
            return plan


@pytest.mark.parametrize("measure", ["params", "macs", "bytes"])
def test_a_problem_comes_back_from_its_file(small_network: nn.Module, small_problem, measure: str) -> None:
    problem = SearchProblem.from_model(small_network, small_problem.sites, (1, 8, 8), **{measure: 0.6})
    read = problem_from_json(json.loads(json.dumps(problem_to_json(problem))), "a test")
    assert read == replace(problem, library=None, divergences=None)
    assert read.fingerprint == problem.fingerprint
    assert read.plan(read.preset, "test") == problem.plan(problem.preset, "test")


def test_a_problem_with_times_and_two_budgets_comes_back(small_network: nn.Module, small_problem) -> None:
    sites = {
        site.name: tuple(float(macs) for macs in site.macs * (1 + np.arange(len(site)) % 2))
        for site in small_problem.sites
    }
    times = LatencyTable(sites, 1e3, borders=dict.fromkeys(list(sites)[:-1], 1.0))
    problem = SearchProblem.from_model(
        small_network, small_problem.sites, (1, 8, 8), macs=0.7, latency=0.8, latencies=times
    )
    read = problem_from_json(json.loads(json.dumps(problem_to_json(problem))), "a test")
    assert read.fingerprint == problem.fingerprint
    assert read.budget == problem.budget


def test_the_file_holds_what_was_measured(file: Path, table: Table) -> None:
    assert bench_tasks() == [NAME, OTHER]
    assert bench_tasks(family="other") == [OTHER]
    read = bench_task(NAME).table
    assert read.problem.fingerprint == table.problem.fingerprint
    np.testing.assert_array_equal(read.choices, table.choices)
    np.testing.assert_allclose(read.judged, table.judged, atol=1e-6)
    assert read.prize == pytest.approx(table.judged.max() - table.judged[0], abs=2e-6)


def test_a_table_answers_for_its_plans_and_a_surrogate_for_others(task: BenchTask, table: Table) -> None:
    row = 7
    plan = tuple(table.choices[row].tolist())
    assert task.measured(plan)
    assert task.uncertainty(plan) == 0
    assert (task.score(plan), task.judged(plan)) == (table.scores[row], table.judged[row])
    assert task.reward(plan) == table.scores[row] - table.scores[0]
    other = unknown_plan(table)
    assert not task.measured(other)
    assert task.uncertainty(other) > 0
    assert abs(task.score(other) - task.judged(other)) < 0.02
    assert task.plans >= 2


def test_a_surrogate_predicts_plans_that_it_does_not_know(task: BenchTask, table: Table) -> None:
    half = Surrogate(table.problem, table.choices[:75], table.scores[:75])
    predicted, _ = half.predict(table.choices[75:])
    assert spearmanr(predicted, table.judged[75:]).statistic > 0.9
    assert task.correlation > 0.9


def test_trees_are_averaged_as_scikit_learn_averages_them(task: BenchTask, table: Table) -> None:
    fitted = table.surrogates["scores"]._fitted
    features = table.surrogates["scores"]._features(table.choices[:5])
    scaled = fitted._scaled(features)
    assert isinstance(fitted._trees, ExtraTreesRegressor)
    expected = fitted._linear(scaled) + fitted._trees.predict(scaled)
    np.testing.assert_allclose(fitted.predict(features)[0], expected.clip(*fitted._range), atol=1e-9)


def test_a_surrogate_that_does_not_correlate_does_not_answer(table: Table) -> None:
    noise = np.random.default_rng(2).permutation(table.scores)
    noisy = BenchTask(replace(table, scores=noise))
    assert noisy.score(table.choices[3]) == noise[3]
    with pytest.raises(ConfigError, match=r"no row of the plan .* correlation is -?0\.\d\d, less than 0.8"):
        noisy.score(unknown_plan(table))


@pytest.mark.parametrize(("selector", "options"), [("greedy", {}), ("random", {}), ("bayes", {})])
def test_selectors_search_a_table(task: BenchTask, selector: str, options: dict[str, None]) -> None:
    result = task.search(selector, 12, **options)
    assert [row.score for row in result.rows] == [task.score(row.key) for row in result.rows]
    assert task.within_budget(result.key)
    assert result.plans <= 12


def test_optuna_maximises_the_score(task: BenchTask) -> None:
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(task.objective, n_trials=8)
    assert study.best_value == max(trial.value for trial in study.trials if trial.value is not None)
    assert set(study.best_params) == set(task.problem.names)
    assert task.score(task.suggested(study.best_trial)) == study.best_value


def test_optunahub_loads_the_package_and_searches_it() -> None:
    optuna, optunahub = pytest.importorskip("optuna"), pytest.importorskip("optunahub")
    scripts = Path(train_agent.__file__).parent
    package = optunahub.load_local_module("optunahub_rankbench", registry_root=str(scripts))
    assert package.Problem.available_tasks() == bench_tasks()
    problem = package.Problem()
    assert problem.evaluate(dict.fromkeys(problem.search_space, 0.0)) == problem.task.score(
        problem.task.greedy
    )
    study = optuna.create_study(directions=problem.directions, sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(problem, n_trials=5)
    plan = problem.task.suggested(study.best_trial)
    assert (study.best_value, problem.regret(study.best_params)) == (
        problem.task.score(plan),
        problem.task.regret(plan),
    )


@pytest.mark.usefixtures("file")
def test_the_environment_draws_tasks_and_pays_the_gain(task: BenchTask) -> None:
    env = gymnasium.make("rankrl/RankBench-v0").unwrapped
    check_env(env, skip_render_check=True)
    check_env_for_sb3(env)
    drawn = {env.reset(seed=seed)[1]["task"] for seed in range(12)}
    assert drawn == {0, 1}
    env.reset(options={"task": OTHER})
    done = False
    while not done:
        _, reward, done, _, info = env.step(np.array([0.5], dtype=np.float32))
    assert info["task"] == 1
    assert reward == pytest.approx(task.reward(info["choices"]), abs=1e-5)
    vector = gymnasium.make_vec("rankrl/RankBench-v0", num_envs=2, task=NAME)
    assert vector.reset(seed=0)[0].shape[0] == 2


@pytest.mark.usefixtures("file")
def test_an_agent_of_stable_baselines3_learns_on_it() -> None:
    from stable_baselines3 import DDPG

    env = gymnasium.make("rankrl/RankBench-v0", task=NAME)
    agent = DDPG("MlpPolicy", env, learning_starts=8, batch_size=8, seed=0, policy_kwargs={"net_arch": [8]})
    before = [weight.clone() for weight in agent.actor.parameters()]
    agent.learn(16)
    assert any(not torch.equal(a, b) for a, b in zip(before, agent.actor.parameters(), strict=True))


@pytest.mark.usefixtures("file")
def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"no task 'small tucker params 0\.55'.* Did you mean 'small"):
        bench_task("small tucker params 0.55")
    with pytest.raises(ConfigError, match="a plan has 4 choices"):
        bench_task(NAME).score((0, 0))
    env = gymnasium.make("rankrl/RankBench-v0", task=NAME)
    with pytest.raises(ConfigError, match=f"has no task '{OTHER}'"):
        env.reset(options={"task": OTHER})


def test_a_damaged_or_foreign_file_is_refused(file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    content["0.json"] = content["0.json"].replace(b'"judged":[', b'"judged":[0.5,', 1)
    damaged, foreign = tmp_path / "damaged.zip", tmp_path / "foreign.zip"
    with zipfile.ZipFile(damaged, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    with pytest.raises(ConfigError, match="is damaged"):
        bench_task(NAME, damaged)
    foreign.write_bytes(b"no zip")
    with pytest.raises(ConfigError, match="is no file of RankBench"):
        bench_tasks(path=foreign)


def test_patterns_choose_the_tasks_that_score_every_plan(
    table: Table, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unsure = replace(table, name="unsure", about={"correlation": 0.7})
    write_tables([table, replace(table, name=OTHER), unsure], file)
    assert [task.name for task in answering_tasks(["small *", NAME])] == [NAME, OTHER]
    assert not caplog.messages
    assert [task.name for task in answering_tasks([OTHER, "unsure"])] == [OTHER]
    assert caplog.messages == ["unsure: its surrogate does not answer, so it is left out"]
    with pytest.raises(ConfigError, match=r"none of the tasks \['unsure'\] scores plans"):
        answering_tasks(["unsure"])


def test_the_environment_of_all_tasks_has_those_that_score_every_plan(table: Table, file: Path) -> None:
    unsure = replace(table, name=OTHER, about={"correlation": 0.7})
    write_tables([table, unsure], file)
    assert gymnasium.make("rankrl/RankBench-v0").unwrapped.names == (NAME,)
    assert gymnasium.make("rankrl/RankBench-v0", task=OTHER).unwrapped.names == (OTHER,)


@pytest.mark.usefixtures("file")
def test_the_tables_script_times_queries_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rankbench, "_STEPS", 4)
    monkeypatch.setattr(rankbench, "_PLANS", 30)
    line = rankbench.speed([NAME]).splitlines()[-1]
    assert re.fullmatch(rf"\| {NAME} \| 4 \| \d+ \| [1-9]\d* \| [1-9]\d* \|", line)


def test_the_agents_script_judges_families_that_training_left_out(
    table: Table, file: Path, tmp_path: Path
) -> None:
    unsure = replace(table, name="unsure", family="other", about={"correlation": 0.7})
    write_tables([table, replace(table, name=OTHER, family="other"), unsure], file)
    plans = ResultRows(tmp_path / "plans.csv", train_agent.KEY, train_agent.VALUES)
    train_agent.fill(plans, bench_tasks(), steps=40, seeds=1)
    assert {(row["task"], row["agent"]) for row in plans.rows} == {
        (name, agent) for name in (NAME, OTHER, "unsure") for agent in train_agent.AGENTS
    }
    for row in plans.rows:
        known, plan = bench_task(row["task"]), tuple(map(int, row["choices"].split()))
        assert known.problem.keeps_budget(plan)
        if known.answers:
            gain = known.judged(plan) - known.judged(known.greedy)
            assert float(row["gain"]) == pytest.approx(gain, abs=1e-6)
    real = ResultRows(tmp_path / "real.csv", ("task", "choices"), ("judged",))
    assert "| whole | 3 |" in train_agent.summary(plans, real)
