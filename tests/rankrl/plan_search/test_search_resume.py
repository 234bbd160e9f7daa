"""A search that was stopped at any moment goes on to the same result, bit for bit."""

import json
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
import torch

from rankrl.errors import CheckpointError, ConfigError
from rankrl.plan_search.run import SETUP_FILE, SearchResult, run_search
from rankrl.plan_search.scores.evaluation import EPISODES_FILE, parse_rows
from rankrl.plan_search.scores.evaluators import EvaluatorOptions, PlanEvaluator, ScoredImages
from rankrl.plan_search.selectors import (
    Proposal,
    Selector,
    create_selector,
    list_selectors,
    register_selector,
    selector_class,
)
from rankrl.plan_search.selectors.random_plans import random_choices
from rankrl.plan_search.selectors.selector import _SELECTORS
from rankrl.testing import surroundings

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
    return [replace(row, seconds=0.0, elapsed=0.0) for row in result.rows]


def recorded(folder: Path) -> list:
    """What `lasting` returns, of a folder."""
    rows = parse_rows((folder / EPISODES_FILE).read_bytes().decode())
    return [replace(row, seconds=0.0, elapsed=0.0) for row in rows]


@pytest.fixture
def own_selectors() -> Iterator[None]:
    """Forgets what the test registers."""
    with _SELECTORS.restored():
        yield


def each_selector() -> Iterator:
    """Every selector with several plans a step where it can, and the quick ones with one."""
    for name in list_selectors():
        several = "plans_per_step" in selector_class(name).default_options()
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
        assert recorded(folder) == recorded(tmp_path / "whole") == lasting(whole)


@pytest.mark.parametrize("name", ["local", "cmaes", "random"])
def test_a_search_killed_while_it_writes_a_step_goes_on_exactly(
    small_problem, synthetic_evaluator, tmp_path, name
) -> None:
    several = {} if name == "cmaes" else {"plans_per_step": 3}
    whole = search(small_problem, synthetic_evaluator, name, tmp_path / "whole", options=several)
    text = (tmp_path / "whole" / EPISODES_FILE).read_bytes()
    ends = [place for place, byte in enumerate(text) if byte == ord("\n")]
    for number, cut in enumerate(
        [0, ends[0] + 1, *(end - 2 for end in ends[1:6]), *(end + 1 for end in ends)]
    ):
        folder = tmp_path / f"killed-{number}"
        folder.mkdir()
        shutil.copy(tmp_path / "whole" / SETUP_FILE, folder)
        if cut:
            (folder / EPISODES_FILE).write_bytes(text[:cut])
        synthetic_evaluator.restore({})
        resumed = search(small_problem, synthetic_evaluator, name, folder, resume=True, options=several)
        assert lasting(resumed) == lasting(whole) == recorded(folder)


def test_the_plans_of_another_processor_are_kept_with_one_warning(
    small_problem, synthetic_evaluator, tmp_path, caplog
) -> None:
    other = search(small_problem, synthetic_evaluator, "random", tmp_path / "other", seed=6, patience=4)
    synthetic_evaluator.restore({})
    mine = search(small_problem, synthetic_evaluator, "random", tmp_path / "mine", patience=1)
    assert len(other.rows) > len(mine.rows)
    shutil.copy(tmp_path / "other" / EPISODES_FILE, tmp_path / "mine" / EPISODES_FILE)
    synthetic_evaluator.restore({})
    found = search(small_problem, synthetic_evaluator, "random", tmp_path / "mine", resume=True)
    assert lasting(found)[: len(other.rows)] == lasting(other)
    assert len(found.rows) == EPISODES
    (message,) = caplog.messages
    assert f"proposes other plans than are recorded up to episode {len(other.rows)}" in message


def test_a_fit_that_rounds_otherwise_is_the_same_search(small_problem) -> None:
    def with_errors(factor: float) -> str:
        sites = [
            replace(
                site, candidates=tuple(replace(each, error=each.error * factor) for each in site.candidates)
            )
            for site in small_problem.sites
        ]
        return replace(small_problem, sites=tuple(sites)).fingerprint

    assert with_errors(1 + 1e-14) == small_problem.fingerprint != with_errors(1.001)


def test_draws_that_do_not_depend_on_the_step_are_told_of(
    small_problem, synthetic_evaluator, tmp_path, caplog, own_selectors
) -> None:
    @register_selector
    class Streaming(Selector):
        """Draws from one generator."""

        name = "streaming"
        description = "draws on"

        def __init__(self, problem, *, seed: int, episodes: int) -> None:
            super().__init__(problem, seed=seed, episodes=episodes)
            self.draws = np.random.default_rng(seed)

        def propose(self) -> list[Proposal]:
            return [Proposal(tuple(random_choices(self.problem, self.draws).tolist()), "random")]

    search(small_problem, synthetic_evaluator, "streaming", tmp_path, patience=2)
    found = search(small_problem, synthetic_evaluator, "streaming", tmp_path, resume=True)
    assert len(found.rows) == EPISODES
    (message,) = caplog.messages
    assert "depends on more than the seed and what it observed" in message


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


def damaged_row(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:3], lines[3].replace(",", ";"), *lines[4:]])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (SETUP_FILE, lambda text: text[:100], "search.json is damaged"),
        (SETUP_FILE, lambda text: "", "search.json is damaged"),
        (SETUP_FILE, lambda text: "[1]", "search.json is damaged"),
        (EPISODES_FILE, damaged_row, r"episodes.csv is damaged .* line 4: episode"),
        (EPISODES_FILE, lambda text: text[20:], r"episodes.csv is damaged .* lacks the columns"),
        (EPISODES_FILE, lambda text: text.replace("\r\n2,", "\r\n3,"), "not numbered"),
        (EPISODES_FILE, lambda text: text.replace('"[', '"', 2), r"episodes.csv is damaged"),
    ],
)
def test_a_damaged_record_is_refused_and_says_what_to_do(
    small_problem, synthetic_evaluator, tmp_path, name, damage, message
) -> None:
    whole = search(small_problem, synthetic_evaluator, "random", tmp_path)
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes().decode()).encode())
    with pytest.raises(CheckpointError, match=f"{message}.* remove that file"):
        search(small_problem, synthetic_evaluator, "random", tmp_path, resume=True)
    path.unlink()
    synthetic_evaluator.restore({})
    again = search(small_problem, synthetic_evaluator, "random", tmp_path, resume=True)
    assert lasting(again) == lasting(whole)


def test_the_setup_is_written_once(small_problem, synthetic_evaluator, tmp_path) -> None:
    search(small_problem, synthetic_evaluator, "random", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "candidates.json",
        EPISODES_FILE,
        SETUP_FILE,
    ]
    assert json.loads((tmp_path / SETUP_FILE).read_text())["seed"] == 5


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
    assert recorded(tmp_path / "killed") == recorded(tmp_path / "whole")
