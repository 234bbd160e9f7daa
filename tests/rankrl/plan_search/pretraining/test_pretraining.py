"""A policy learns from the plans of tasks which layers count for more, and carries that over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rankrl.errors import CheckpointError, ConfigError
from rankrl.options.tasks import EpisodeOptions, PretrainingOptions
from rankrl.plan_search import pretraining
from rankrl.plan_search.agents.policy_file import PolicyCard, PolicyFile, PolicyTask
from rankrl.plan_search.envs.actions import ImportanceMap
from rankrl.plan_search.envs.observations import DESCRIBING, ObservationEncoder
from rankrl.plan_search.pretraining import (
    TaskEpisodes,
    play_episodes,
    read_episodes,
    task_fits,
    task_of,
    train_policy,
    unexplained,
    weights_fingerprint,
)
from rankrl.plan_search.scores.evaluators import PlanEvaluator
from rankrl.plan_search.space.problem import SearchProblem

QUICK = PretrainingOptions(hidden=(8,), steps=150, learning_rate=1e-2, jitter=0.05, restraint=0.0)
CARD = PolicyCard(DESCRIBING, 2.0, (8,), ())


def invented(observations: np.ndarray, action: np.ndarray, seed: int, plans: int = 40) -> TaskEpisodes:
    """A task whose plans gain exactly what the additive model says under the action of every layer."""
    generator = np.random.default_rng(seed)
    preset = generator.uniform(0.5, 2.0, len(action))
    losses = preset * generator.uniform(0.7, 1.3, (plans, len(action)))
    gains = -0.1 * ((losses - preset) @ np.exp(2.0 * action)) / preset.sum()
    task = PolicyTask("invented", str(seed), "nothing", ("tucker",), {"params": 0.25})
    return TaskEpisodes(task, observations, preset, losses, gains)


def task(seed: int, layers: int) -> TaskEpisodes:
    """Layers whose first descriptor is above a half count for more; the others tell nothing."""
    observations = np.random.default_rng(100 + seed).uniform(0, 1, (layers, 5))
    return invented(observations, np.where(observations[:, 0] > 0.5, 0.4, -0.4), seed)


@pytest.fixture(scope="module")
def policy() -> PolicyFile:
    return train_policy([task(seed, 12) for seed in range(8)], CARD, QUICK, seed=0)


def test_the_policy_explains_the_gains_of_tasks_that_it_has_not_seen(policy) -> None:
    for seed, layers in ((50, 9), (51, 30)):
        unseen = task(seed, layers)
        assert unexplained(unseen, policy) < 0.4 * unexplained(unseen)


def test_what_is_left_of_a_task_is_told_by_a_policy_that_has_not_seen_its_network() -> None:
    tasks = [task(seed, 12) for seed in range(4)]
    # Two tasks of one network and format, and a network of its own in which other layers count.
    tasks[1] = replace(tasks[1], task=replace(tasks[0].task, budgets={"params": 0.1}))
    contrary = np.random.default_rng(7).uniform(0, 1, (12, 5))
    tasks[3] = invented(contrary, np.where(contrary[:, 0] > 0.5, -0.4, 0.4), 3)
    options = replace(QUICK, steps=60)
    found = task_fits(tasks, train_policy(tasks, CARD, options, seed=0), options, seed=0)
    alone = train_policy(tasks[2:], CARD, options, seed=0)
    assert [fit.unseen for fit in found[:2]] == [unexplained(each, alone) for each in tasks[:2]]
    assert [fit.greedy for fit in found] == [unexplained(each) for each in tasks]
    assert found[3].unseen is not None
    assert found[3].policy < found[3].unseen
    single = task_fits(tasks[:2], alone, options, seed=0)
    assert [fit.unseen for fit in single] == [None, None]


def test_nothing_is_left_over_where_the_additive_model_holds() -> None:
    flat = invented(np.zeros((6, 5)), np.zeros(6), 0)
    assert unexplained(flat) == pytest.approx(0.0, abs=1e-9)


def test_the_seed_decides_and_the_global_generator_is_left_alone() -> None:
    tasks = [task(seed, 6) for seed in range(2)]
    options = replace(QUICK, steps=3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (train_policy(tasks, CARD, options, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first.layers, again.layers, strict=True))
    assert not torch.equal(first.layers[0][0], other.layers[0][0])


def test_the_previous_action_weighs_nothing(policy) -> None:
    assert policy.observed == 6
    assert not policy.layers[0][0][:, -1].any()


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"learning_rate": 0.0}, {"jitter": -1.0}, {"hidden": (8, 0)}, {"hidden": ()}]
)
def test_options_out_of_range_are_refused(options) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        PretrainingOptions(**options)


def play(
    problem: SearchProblem, evaluator: PlanEvaluator, plans: int = 6, identity: str = ""
) -> TaskEpisodes:
    task = task_of(problem, model="small", dataset="noise")
    options = EpisodeOptions(plans=plans, noises=(0.3, 0.8), batches=1)
    return play_episodes(problem, evaluator, task, options, seed=0, identity=identity)


def test_gains_are_taken_against_greedys_plan_on_the_same_images(small_problem, small_evaluator) -> None:
    """The oracle scores whole plans and picks the images of the batch itself."""
    found = play(small_problem, small_evaluator)
    generator, importance = np.random.default_rng(0), ImportanceMap(small_problem, scale=2.0)
    dense = small_evaluator.forward(tuple(s.dense for s in small_problem.sites), 0, 3).softmax(1)

    def overlap(choices, batch: int) -> float:
        scores = small_evaluator.forward(choices, 0, 3).softmax(1)
        rows = slice(32 * batch, 32 * (batch + 1))
        return float(torch.minimum(scores[rows], dense[rows]).sum(1).double().mean())

    for number in range(6):
        noise = (0.3, 0.8)[number % 2] * generator.standard_normal(len(small_problem.sites))
        choices = tuple(importance.allocate(noise.clip(-1, 1)).tolist())
        wanted = overlap(choices, number % 3) - overlap(tuple(small_problem.preset), number % 3)
        assert found.gains[number] == pytest.approx(wanted, abs=1e-6)
        lost = [site.losses[j] for site, j in zip(small_problem.sites, choices, strict=True)]
        np.testing.assert_array_equal(found.losses[number], lost)


def test_episodes_hold_what_the_policy_will_see(small_problem, small_evaluator) -> None:
    found = play(small_problem, small_evaluator, plans=1)
    seen = ObservationEncoder(small_problem, DESCRIBING)(np.zeros(0))
    np.testing.assert_allclose(found.observations[0], seen[:-1], rtol=1e-6)


def test_files_return_what_was_saved(small_problem, small_evaluator, tmp_path: Path) -> None:
    path, found = tmp_path / "task.safetensors", play(small_problem, small_evaluator, identity="a")
    found.save(path)
    loaded = read_episodes(path)
    assert (loaded.task, loaded.identity) == (found.task, "a")
    np.testing.assert_array_equal(loaded.gains, found.gains)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="damaged"):
        read_episodes(path)


def test_a_task_is_played_once_with_the_same_settings(
    small_problem, small_evaluator, tmp_path, monkeypatch
) -> None:
    seeds, play_episodes = [], pretraining.play_episodes

    def recording(*arguments, seed: int, **options) -> TaskEpisodes:
        seeds.append(seed)
        return play_episodes(*arguments, seed=seed, **options)

    monkeypatch.setattr(pretraining, "play_episodes", recording)
    one, options = task_of(small_problem, model="small", dataset="noise"), EpisodeOptions(plans=1, batches=1)
    for seed in (0, 0, 1, 0):
        pretraining._played(small_problem, small_evaluator, one, options, tmp_path, seed)
    assert seeds == [0, 1, 0]


def test_tasks_are_told_apart_by_weights_formats_and_budgets(small_problem, small_network) -> None:
    one = task_of(small_problem, model="a", dataset="b")
    assert one.decision == task_of(small_problem, model="other", dataset="other").decision
    sites = small_problem.sites
    other = SearchProblem.from_model(
        small_network, sites, (1, 8, 8), params=0.4, library=small_problem.library
    )
    assert one.decision != task_of(other, model="a", dataset="b").decision
    assert len(weights_fingerprint(small_problem.library)) == 16
    card = replace(CARD, tasks=(one,))
    card.check_held_out(task_of(other, model="a", dataset="b"))
    with pytest.raises(ConfigError, match="another network, format or budget"):
        card.check_held_out(one)
