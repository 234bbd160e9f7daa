"""Agents that start from a policy file play its plan first; files that do not fit are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from rankrl.errors import CheckpointError, ConfigError
from rankrl.plan_search.agents.policy_file import (
    PRETRAINED_REFITTED,
    PolicyCard,
    PolicyFile,
    PolicyTask,
    read_policy,
    resolved_policy,
)
from rankrl.plan_search.envs.actions import ImportanceMap
from rankrl.plan_search.envs.observations import DESCRIBING, ObservationEncoder, descriptor_names
from rankrl.plan_search.selectors import Selector, check_selector, create_selector
from rankrl.plan_search.space.problem import SearchProblem, SearchSetting

FAST_AGENT = {"warmup_episodes": 4, "updates_per_episode": 4, "batch_size": 8}
FAST_BAYES = {"warmup_episodes": 4, "candidates": 8}
AGENTS = ("ddpg", "td3", "sac")
BAYES = ("bayes",)
TASK = PolicyTask("small", "0123456789abcdef", "noise", ("cp", "tucker"), {"params": 0.25})


@pytest.fixture
def policy(small_problem) -> PolicyFile:
    observed = ObservationEncoder(small_problem, DESCRIBING).size
    generator = torch.Generator().manual_seed(1)
    sizes = [observed, 12, 6, 1]
    layers = tuple(
        (
            3 * torch.randn(out, given, generator=generator) / given**0.5,
            torch.randn(out, generator=generator) / 4,
        )
        for given, out in pairwise(sizes)
    )
    return PolicyFile(layers, PolicyCard(DESCRIBING, 1.5, (12, 6), (TASK,), versions={"rankrl": "0"}))


@pytest.fixture
def path(policy, tmp_path: Path) -> Path:
    policy.save(tmp_path / "policy.safetensors")
    return tmp_path / "policy.safetensors"


def make(name: str, problem: SearchProblem, path: Path, **options) -> Selector:
    fast = FAST_BAYES if name in BAYES else FAST_AGENT
    return create_selector(name, problem, seed=0, episodes=12, **{**fast, "policy": str(path), **options})


def actions_by_hand(policy: PolicyFile, problem: SearchProblem) -> np.ndarray:
    """What the layers of the file say, one layer of the network after the other."""
    encoder, actions = ObservationEncoder(problem, DESCRIBING), np.zeros(len(problem.sites))
    for layer in range(len(problem.sites)):
        values = torch.from_numpy(encoder(actions[:layer]))
        for number, (weight, bias) in enumerate(policy.layers):
            values = weight @ values + bias
            values = torch.tanh(values) if number == 2 else torch.relu(values)
        actions[layer] = float(values)
    return actions


def test_a_file_returns_what_was_saved(policy, path) -> None:
    found = PolicyFile.load(path)
    assert found.card == policy.card
    for saved, loaded in zip(policy.layers, found.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))


@pytest.mark.parametrize("name", [*AGENTS, *BAYES])
def test_the_first_plan_is_the_policys_and_the_second_greedys(small_problem, policy, path, name) -> None:
    selector = make(name, small_problem, path)
    (first,) = selector.propose()
    wanted = ImportanceMap(small_problem, scale=1.5).allocate(actions_by_hand(policy, small_problem))
    assert (first.choices, first.phase) == (tuple(wanted), "pretrained")
    assert first.choices != tuple(small_problem.preset)
    selector.observe([first], [0.5])
    (second,) = selector.propose()
    assert (second.choices, second.phase) == (tuple(small_problem.preset), "preset")


def test_it_serves_a_network_with_other_layers(small_problem, small_network, path) -> None:
    fewer = SearchProblem.from_model(small_network, small_problem.sites[1:], (1, 8, 8), params=0.6)
    (first,) = make("ddpg", fewer, path).propose()
    assert len(first.choices) == len(small_problem.sites) - 1


@pytest.mark.parametrize("name", AGENTS)
def test_the_actor_learns_only_after_the_warm_up(small_problem, path, name) -> None:
    selector = make(name, small_problem, path)

    def actor() -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in selector.model.actor.parameters()]

    def step() -> bool:
        before = actor()
        proposals = selector.propose()
        selector.observe(proposals, [float(np.tanh(sum(proposals[0].choices) / 20))])
        return all(torch.equal(a, b) for a, b in zip(before, actor(), strict=True))

    kept = [step() for _ in range(8)]
    assert all(kept[:3])
    assert not any(kept[4:])


@pytest.mark.parametrize("name", [*AGENTS, *BAYES])
def test_a_search_goes_on_exactly(small_problem, path, name) -> None:
    def run(selector: Selector, steps: int) -> list:
        plans = []
        for _ in range(steps):
            proposals = selector.propose()
            plans += proposals
            selector.observe(proposals, [float(np.tanh(sum(each.choices) / 20)) for each in proposals])
        return plans

    whole = run(make(name, small_problem, path), 8)
    resumed = make(name, small_problem, path)
    for proposal in whole[:5]:
        resumed.observe([proposal], [float(np.tanh(sum(proposal.choices) / 20))])
    assert run(resumed, 3) == whole[5:]


@pytest.mark.parametrize("name", BAYES)
def test_the_process_begins_with_how_the_policy_counts_losses(small_problem, policy, path, name) -> None:
    selector = make(name, small_problem, path)
    actions = actions_by_hand(policy, small_problem)
    counts = selector._model._counts
    assert counts / counts[0] == pytest.approx(np.exp(1.5 * (actions - actions[0])), rel=1e-5)
    assert make(name, small_problem, path, policy=None)._model._counts is None


def test_options_that_contradict_the_policy_are_refused(small_problem, small_network, path) -> None:
    with pytest.raises(ConfigError, match=r"hidden=\[7\] contradicts .* trained with \[12,6\]"):
        make("ddpg", small_problem, path, hidden=(7,))
    with pytest.raises(ConfigError, match=r"leave selector.features out"):
        check_selector("td3", {"policy": str(path), "features": ("identity",)})
    free = SearchProblem.from_model(small_network, small_problem.sites, (1, 8, 8))
    for name in ("sac", *BAYES):
        with pytest.raises(ConfigError, match=r"importance; leave selector.action"):
            make(name, small_problem, path, action="rank")
        with pytest.raises(ConfigError, match="budget"):
            make(name, free, path)


def test_files_that_do_not_fit_are_refused(policy, path, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no policy file .*task=pretrain"):
        check_selector("ddpg", {"policy": str(tmp_path / "none.safetensors")})
    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(2)}, other)
    with pytest.raises(CheckpointError, match="no policy file"):
        PolicyFile.load(other)
    other.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"):
        PolicyFile.load(other)
    replace(policy, card=replace(policy.card, descriptors=("depth", "colour"))).save(other)
    with pytest.raises(CheckpointError, match=r"does not have \(colour\)"):
        PolicyFile.load(other)
    replace(policy, card=replace(policy.card, hidden=(12, 7))).save(other)
    with pytest.raises(CheckpointError, match="its layer 1 has the shape"):
        PolicyFile.load(other)
    weight, bias = policy.layers[0]
    replace(policy, layers=((weight * torch.nan, bias), *policy.layers[1:])).save(other)
    with pytest.raises(CheckpointError, match="not finite"):
        PolicyFile.load(other)


def test_a_policy_that_sees_another_number_of_features_is_refused(policy, small_problem, tmp_path) -> None:
    weight, bias = policy.layers[0]
    other = tmp_path / "other.safetensors"
    replace(policy, layers=((weight[:, :-3], bias), *policy.layers[1:])).save(other)
    with pytest.raises(ConfigError, match=r"sees .* numbers of a layer"):
        make("ddpg", small_problem, other)


def test_another_version_is_refused(policy, path) -> None:
    tensors = safetensors.torch.load_file(path)
    text = json.dumps({"version": 99, "card": {}})
    safetensors.torch.save_file(tensors, path, metadata={"rankrl": text})
    with pytest.raises(CheckpointError, match="version 99"):
        PolicyFile.load(path)


def test_a_policy_for_every_network_sees_nothing_that_depends_on_one() -> None:
    with pytest.raises(ConfigError, match="identity"):
        PolicyCard(("macs", "identity"), 2.0, (8,), ())


def test_the_policy_that_comes_with_rankrl_proposes_a_plan_for_any_network(small_problem) -> None:
    policy = read_policy(PRETRAINED_REFITTED)
    assert set(policy.card.descriptors) <= set(descriptor_names())  # formats may have been added since
    assert {task.model for task in policy.card.tasks} == {"resnet20"}
    (first,) = make("ddpg", small_problem, Path(PRETRAINED_REFITTED)).propose()
    assert first.phase == "pretrained"
    assert small_problem.keeps_budget(first.choices)


@pytest.mark.parametrize(
    ("policy", "action", "setting", "expected"),
    [
        ("auto", None, SearchSetting(("params",)), PRETRAINED_REFITTED),
        ("auto", "importance", SearchSetting(("latency", "bytes"), borders=True), PRETRAINED_REFITTED),
        ("auto", None, SearchSetting(()), None),
        ("auto", "rank", SearchSetting(("params",)), None),
        ("auto", None, SearchSetting(("params",), narrows=True), None),
        (None, None, SearchSetting(("params",)), None),
        ("mine.safetensors", None, SearchSetting(()), "mine.safetensors"),
    ],
)
def test_the_default_policy_is_for_ranks_and_roundings_within_a_budget(
    policy, action, setting, expected
) -> None:
    assert resolved_policy(policy, action, setting) == expected


def test_a_search_begins_with_the_policy_unless_told_otherwise(small_problem, small_network, caplog) -> None:
    caplog.set_level("INFO")
    first, named, without = (
        create_selector("bayes", small_problem, **options).propose()
        for options in ({}, {"policy": PRETRAINED_REFITTED}, {"policy": None})
    )
    assert first == named
    assert [each.phase for each in (*first, *without)] == ["pretrained", "preset"]
    free = SearchProblem.from_model(small_network, small_problem.sites, (1, 8, 8))
    for problem, options in ((free, {}), (small_problem, {"action": "rank"})):
        assert create_selector("bayes", problem, **options).propose()[0].phase == "preset"
    assert "begins with the policy pretrained_refitted" in caplog.text
    assert "begins with greedy's plan" in caplog.text
