"""A task of `rankrl.make_task` is what searches of the command line and of Python search."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from call_options import layer_options
from command_line import call, read_json, workplace
from gymnasium.utils.env_checker import check_env
from small_graphs import convolutions, images
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3

import rankrl
from rankrl.data import load_dataset
from rankrl.errors import ConfigError
from rankrl.models import create_model, save_checkpoint
from rankrl.plan_search.envs.rank_selection import repeat, rollout
from rankrl.plan_search.scores.evaluation import EpisodeRow, parse_rows
from rankrl.plan_search.selectors.selector import heuristic_choices

Made = tuple[rankrl.SearchTask, list[EpisodeRow], bool]
FITS: dict[str, Any] = {"candidates": 3, "iterations": 0, "final_iterations": 0}


def by_command_line(folder: Path) -> Made:
    """The task of a data set's network, and what the command line recorded of the same."""
    data = load_dataset("digits")
    torch.manual_seed(0)
    model = create_model("conv4", input_shape=data.input_shape, num_classes=data.classes)
    save_checkpoint(model, folder / "dense.safetensors")
    options = [f"decomposition.{name}={value}" for name, value in FITS.items()]
    with workplace(folder):
        call(
            *("task=search", "model=conv4", "decomposition=tucker", "budget.params=0.5", "selector=ddpg"),
            *("search.episodes=3", "search.images=100", "hydra.run.dir=run", *options),
            f"model.checkpoint={folder / 'dense.safetensors'}",
        )
    how = rankrl.DecompositionOptions(format="tucker", **FITS)
    search = rankrl.SearchOptions(images=100)
    task = rankrl.make_task(model, data, decomposition=how, params=0.5, search=search)
    assert read_json(folder / "run" / "search.json")["problem"] == task.problem.fingerprint
    return task, parse_rows((folder / "run" / "episodes.csv").read_text()), False


def of_module(folder: Path, **options: Any) -> Made:
    torch.manual_seed(0)
    layers = (torch.nn.Conv2d(3, 12, 3), torch.nn.ReLU(), torch.nn.Conv2d(12, 16, 3))
    model, inputs = torch.nn.Sequential(*layers).eval(), torch.randn(40, 3, 12, 12)
    expected = model(inputs).detach()

    def score(network: torch.nn.Module) -> float:
        return -float((network(inputs) - expected).square().mean())

    return searched(model, inputs, score=score, **options)


def of_file(folder: Path) -> Made:
    onnx.save(convolutions(), folder / "net.onnx")
    return searched(folder / "net.onnx", images(60))


def searched(*network: Any, **options: Any) -> Made:
    options |= {"params": 0.5, "decomposition": layer_options(**FITS)}
    search = rankrl.SearchOptions(episodes=3, finalists=1)
    found = rankrl.search(*network, selector="ddpg", search=search, **options)
    return rankrl.make_task(*network, **options), list(found.rows), isinstance(network[0], Path)


KINDS = {"data set": by_command_line, "module": of_module, "file": of_file}


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A task, the rows of the same search, and whether it is of a file."""
    return KINDS[request.param](tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def small_task(tmp_path_factory: pytest.TempPathFactory) -> rankrl.SearchTask:
    return of_module(tmp_path_factory.mktemp("module"))[0]


def test_plans_score_and_are_played_as_the_search_recorded_them(made: Made) -> None:
    task, rows, _ = made
    assert rows[0].phase == "preset"
    assert task.greedy == rows[0].key == heuristic_choices(task.problem, "greedy")
    for row in rows:
        assert task.score(row.key) == row.score
        played = rollout(task.env(), repeat(np.array(json.loads(row.actions))))
        assert (played.choices, played.reward) == (row.key, row.reward)
    assert task.plans == len({row.key for row in rows})
    assert task.reward(task.best) == max(row.reward for row in rows)


def test_the_environments_pass_both_checkers(made: Made) -> None:
    task, *_ = made
    several = task.vec_env(2, lambda choices: 0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for env in (task.env(), task.env(features=("budget", "plan")), several.envs[1].unwrapped):
            check_env(env, skip_render_check=True)
            check_env_for_sb3(env)
    observations = several.reset()
    assert observations.shape == (2, *task.env().observation_space.shape)
    several.close()


def test_a_module_comes_back_and_a_file_is_written(made: Made, tmp_path: Path) -> None:
    task, kept = made[0], made[0].problem.cost(made[0].greedy).params
    target, missing = tmp_path / "small.onnx", None
    right, wrong = (target, missing) if made[2] else (missing, target)
    with pytest.raises(ConfigError, match=r"leave target= out|task\.apply\(choices, \"small\.onnx\"\)"):
        task.apply(task.greedy, wrong)
    small = task.apply(task.greedy, right)
    found = small.after["params"] if made[2] else sum(each.numel() for each in small.parameters())
    assert found == kept


@pytest.mark.parametrize("choices", [(), (0,), (0, 99), (0, -1)])
def test_what_is_no_plan_is_refused(small_task: rankrl.SearchTask, choices: tuple[int, ...]) -> None:
    for call_of in (small_task.score, small_task.reward, small_task.plan, small_task.apply):
        with pytest.raises(ConfigError, match=r"a plan has 2 choices.*greedy's is \(\d, \d\)"):
            call_of(choices)


def test_a_plan_over_the_budget_is_scored_and_not_applied(small_task: rankrl.SearchTask) -> None:
    dense = tuple(site.dense for site in small_task.problem.sites)
    assert small_task.best == small_task.greedy
    assert small_task.score(dense) == pytest.approx(0)
    assert small_task.best != dense
    assert [small_task.within_budget(plan) for plan in (dense, small_task.greedy)] == [False, True]
    with pytest.raises(ConfigError, match=r"over the budget; task\.within_budget"):
        small_task.apply(dense)


def test_a_reward_may_be_named_or_given(tmp_path: Path) -> None:
    task, rows, _ = of_module(tmp_path, reward="weighted", reward_options={"compression": 0.5})
    evaluation = task.reward(rows[0].key)
    assert evaluation == 0.5 * rows[0].score + 0.5 * (1 - rows[0].params_kept) == rows[0].reward
    assert rollout(task.env(lambda choices: 7.5), repeat(np.zeros(2))).reward == 7.5


@pytest.mark.parametrize("named", [True, False])
def test_the_environment_names_the_cache_of_calls_that_name_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    monkeypatch.setenv("RANKRL_CACHE", str(other))
    of_module(tmp_path, **({"cache": own} if named else {}))
    assert [any(folder.rglob("*.*")) for folder in (own, other)] == [named, not named]


def test_what_a_task_cannot_be_made_of_is_refused() -> None:
    data = load_dataset("digits")
    model = create_model("conv4", input_shape=data.input_shape, num_classes=data.classes)
    with pytest.raises(ConfigError, match="make_task takes a score"):
        rankrl.make_task(model, torch.zeros(8, 1, 8, 8), params=0.5)
    with pytest.raises(ConfigError, match="score= means nothing for a data set"):
        rankrl.make_task(model, data, params=0.5, score=lambda _: 1.0)
    with pytest.raises(ConfigError, match="give a budget"):
        rankrl.make_task(model, data)
