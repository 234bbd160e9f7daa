"""The picture of a policy says which descriptors its actions follow."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import policy_picture as script
import pytest
import torch
from PIL import Image

from rankrl.plan_search.agents.policy_file import PolicyCard, PolicyFile, PolicyTask
from rankrl.plan_search.envs.descriptors import DESCRIPTOR_NAMES, OF_THE_TASK
from rankrl.plan_search.envs.features import DESCRIBING
from rankrl.plan_search.pretraining.episodes import TaskEpisodes

pytestmark = pytest.mark.slow

TASK = PolicyTask("net", "a", "cifar10", ("tucker",), {"params": 0.25})
LAYERS, OBSERVED = 9, 12 + len(DESCRIPTOR_NAMES)


@pytest.fixture
def policy() -> PolicyFile:
    """Gives more the wider a layer's stride is, and nothing else counts."""
    weight = torch.zeros(1, OBSERVED)
    weight[0, OBSERVED - 1 - len(DESCRIPTOR_NAMES) + DESCRIPTOR_NAMES.index("stride")] = 1.0
    return PolicyFile(((weight, torch.zeros(1)),), PolicyCard(DESCRIBING, 2.0, (), (TASK,)))


def task(seed: int) -> TaskEpisodes:
    seen = np.random.default_rng(seed).random((LAYERS, OBSERVED - 1))
    seen[:, OBSERVED - 1 - len(DESCRIPTOR_NAMES) + DESCRIPTOR_NAMES.index("widening")] = 0.5
    return TaskEpisodes(TASK, seen, np.ones(LAYERS), np.ones((2, LAYERS)), np.zeros(2))


def test_actions_go_with_the_descriptor_that_makes_them(policy: PolicyFile) -> None:
    found = script.correlations(policy, [task(0), task(1)])
    np.testing.assert_allclose(found["stride"], 1.0)
    assert abs(found["kernel"]).max() < 1
    assert not {"widening", *OF_THE_TASK} & set(found)


def test_it_draws_the_tasks_of_runs(
    policy: PolicyFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy.save(tmp_path / "policy.safetensors")
    task(0).save(tmp_path / "run/state/tasks/0.safetensors", "x")
    picture = tmp_path / "policy.png"
    arguments = ["--policy", tmp_path / "policy.safetensors", "--runs", tmp_path / "run", "--output", picture]
    monkeypatch.setattr(sys, "argv", ["policy_picture.py", *map(str, arguments)])
    script.main()
    assert Image.open(picture).size[0] > 500
    assert capsys.readouterr().out.splitlines()[2] == "| stride | +1.00 | +1.00 | +1.00 |"
