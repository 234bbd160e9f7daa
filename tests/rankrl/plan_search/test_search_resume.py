"""A search that was stopped at any moment goes on to the same result, bit for bit."""

from __future__ import annotations

import csv
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from rankrl.errors import CheckpointError, ConfigError
from rankrl.plan_search.run import STATE_FILE, SearchResult, run_search
from rankrl.plan_search.scores.evaluation import EPISODES_FILE
from rankrl.plan_search.scores.evaluators import EvaluatorOptions, PlanEvaluator, ScoredImages
from rankrl.plan_search.selectors import create_selector, list_selectors, selector_options
from rankrl.testing.selectors import surroundings

EPISODES = 10
FAST_POLICY = {"warmup_episodes": 4, "updates_per_episode": 4, "batch_size": 8}
FAST_BAYES = {"warmup_episodes": 4, "candidates": 4}
FAST = {
    "ddpg": FAST_POLICY,
    "td3": FAST_POLICY,
    "sac": FAST_POLICY,
    "bayes": FAST_BAYES,
    "cmaes": {"population": 3},
}


def options(name: str) -> dict:
    return FAST.get(name, {})


class Killed(BaseException):
    """Stands for the end of the process."""


class CopyingEvaluator:
    """Passes plans on, and keeps the folder as a process that is killed before the call leaves it."""

    def __init__(self, evaluator, folder: Path) -> None:
        self.inner, self.folder, self.calls = evaluator, folder, 0
        self.fingerprint, self.restore = evaluator.fingerprint, evaluator.restore

    def evaluate(self, plans):
        self.calls += 1
        shutil.copytree(self.folder, self.folder.with_name(f"killed-{self.calls}"))
        return self.inner.evaluate(plans)


class FragileEvaluator:
    """Passes plans on to another evaluator, and dies before a given call."""

    def __init__(self, evaluator, dies_at: int) -> None:
        self.inner, self.dies_at, self.calls = evaluator, dies_at, 0
        self.fingerprint, self.restore = evaluator.fingerprint, evaluator.restore

    def evaluate(self, plans):
        self.calls += 1
        if self.calls == self.dies_at:
            raise Killed
        return self.inner.evaluate(plans)


def search(problem, evaluator, name: str, folder: Path | None, **changes) -> SearchResult:
    selector_options = {**options(name), **changes.pop("options", {})}
    seed = changes.pop("seed", 5)
    selector = create_selector(name, problem, seed=seed, episodes=EPISODES, **selector_options)
    return run_search(problem, evaluator, selector, folder=folder, **{"episodes": EPISODES, **changes})


def lasting(result: SearchResult) -> list:
    """Everything in the rows but how long scoring took."""
    return [replace(row, seconds=0.0) for row in result.rows]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / STATE_FILE)


def each_selector() -> Iterator:
    """Every selector with several plans a step where it can, and the quick ones with one."""
    for name in list_selectors():
        several = "plans_per_step" in selector_options(name)
        if several:
            yield pytest.param(name, {"plans_per_step": 3}, id=f"{name}-3")
        slow = several and (name in FAST or name == "tpe")
        yield pytest.param(name, {}, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("name", "several"), list(each_selector()))
def test_every_selector_goes_on_exactly(small_problem, synthetic_evaluator, tmp_path, name, several) -> None:
    before = surroundings()
    copying = CopyingEvaluator(synthetic_evaluator, tmp_path / "whole")
    whole = search(small_problem, copying, name, tmp_path / "whole", options=several)
    assert surroundings() == before
    assert copying.calls > 3 or len(whole.rows) == 1
    # Agents have learned nothing before the second step.
    for dies_at in [each for each in ((2, 4) if name in FAST else (1, 2, 4)) if each <= copying.calls]:
        synthetic_evaluator.restore({})  # what one run knows must not help the other
        folder = tmp_path / f"killed-{dies_at}"
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(dies_at)
        resumed = search(small_problem, synthetic_evaluator, name, folder, resume=True, options=several)
        assert lasting(resumed) == lasting(whole)
        assert resumed.plan == whole.plan
        expected, found = tensors(tmp_path / "whole"), tensors(folder)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
        with (folder / EPISODES_FILE).open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["episode"]) for row in rows] == list(range(1, len(whole.rows) + 1))
        assert [row["choices"] for row in rows] == [row.choices for row in whole.rows]


def test_a_real_evaluator_goes_on_exactly(
    small_network, small_library, small_problem, small_images, tmp_path
) -> None:
    def evaluator() -> PlanEvaluator:
        return PlanEvaluator(
            small_network,
            small_library,
            small_problem,
            ScoredImages(small_images, (0.5,), (0.25,)),
            options=EvaluatorOptions(metric="soft_agreement", augmented=False, batch_size=16),
        )

    whole = search(small_problem, evaluator(), "random", tmp_path / "whole")
    with pytest.raises(Killed):
        search(small_problem, FragileEvaluator(evaluator(), 6), "random", tmp_path / "killed")
    resumed = search(small_problem, evaluator(), "random", tmp_path / "killed", resume=True)
    assert lasting(resumed) == lasting(whole)


def test_a_finished_search_is_returned_without_scoring_anything(
    small_problem, synthetic_evaluator, tmp_path
) -> None:
    first = search(small_problem, synthetic_evaluator, "random", tmp_path)
    calls = synthetic_evaluator.calls
    again = search(small_problem, synthetic_evaluator, "random", tmp_path, resume=True)
    assert lasting(again) == lasting(first)
    assert synthetic_evaluator.calls == calls


def test_a_new_search_does_not_overwrite_another(small_problem, synthetic_evaluator, tmp_path) -> None:
    search(small_problem, synthetic_evaluator, "random", tmp_path)
    with pytest.raises(ConfigError, match="resume"):
        search(small_problem, synthetic_evaluator, "random", tmp_path)


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"seed": 6}, "seed"), ({"episodes": 20}, "episodes"), ({"name": "local"}, "selector")],
)
def test_another_search_is_refused_by_name(
    small_problem, synthetic_evaluator, tmp_path, changes, what
) -> None:
    search(small_problem, synthetic_evaluator, "random", tmp_path)
    with pytest.raises(CheckpointError, match=what):
        search(
            small_problem, synthetic_evaluator, folder=tmp_path, resume=True, **{"name": "random", **changes}
        )


def test_a_damaged_state_is_refused(small_problem, synthetic_evaluator, tmp_path) -> None:
    search(small_problem, synthetic_evaluator, "random", tmp_path)
    state = tmp_path / STATE_FILE
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"):
        search(small_problem, synthetic_evaluator, "random", tmp_path, resume=True)


def test_a_torn_table_is_made_whole(small_problem, synthetic_evaluator, tmp_path) -> None:
    first = search(small_problem, synthetic_evaluator, "random", tmp_path)
    table = tmp_path / EPISODES_FILE
    whole = table.read_text()
    table.write_text(whole[: len(whole) // 2] + "garbage")
    search(small_problem, synthetic_evaluator, "random", tmp_path, resume=True)
    assert table.read_text() == whole
    assert len(first.rows) == EPISODES


@pytest.mark.slow
def test_a_process_killed_at_random_moments_goes_on_exactly(tmp_path) -> None:
    worker = Path(__file__).with_name("resume_worker.py")
    root = Path(__file__).parents[3]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    kills = int(os.environ.get("RANKRL_KILLS", "2"))
    episodes = 10 * (kills + 1)

    def start(folder: Path) -> subprocess.Popen[str]:
        command = [sys.executable, str(worker), str(folder), "ddpg", str(episodes)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)

    whole = start(tmp_path / "whole").communicate()[0].partition("{")[2]
    assert whole
    chance = random.Random(0)
    for _ in range(kills):
        process = start(tmp_path / "killed")
        assert process.stdout is not None
        for _ in range(chance.randint(1, 6)):  # some episodes, and then a moment more
            process.stdout.readline()
        time.sleep(chance.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    resumed = start(tmp_path / "killed").communicate()[0].partition("{")[2]
    assert resumed == whole
    expected, found = tensors(tmp_path / "whole"), tensors(tmp_path / "killed")
    assert all(torch.equal(expected[key], found[key]) for key in expected)
