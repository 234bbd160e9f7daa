"""The transfer script scores both plans on images that trained nothing, and refuses what the policy knows."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transfer as script

from rankrl.data import load_dataset
from rankrl.errors import ConfigError
from rankrl.models import create_model, save_checkpoint
from rankrl.networks.candidates import CandidateOptions
from rankrl.plan_search.agents.policy_file import PolicyCard, PolicyFile, PolicyTask
from rankrl.plan_search.envs.descriptors import DESCRIPTOR_NAMES
from rankrl.plan_search.envs.features import CURVE_POINTS, DESCRIBING

pytestmark = pytest.mark.slow

KNOWN = PolicyTask("resnet20", "a", "cifar10", ("tucker",), {"params": 0.25})
OBSERVED = 8 + 1 + CURVE_POINTS + len(DESCRIPTOR_NAMES) + 1


@pytest.fixture
def policy() -> PolicyFile:
    generator = torch.Generator().manual_seed(0)
    layers = tuple(
        (torch.randn(out, given, generator=generator), torch.zeros(out))
        for given, out in [(OBSERVED, 4), (4, 1)]
    )
    return PolicyFile(layers, PolicyCard(DESCRIBING, 2.0, (4,), (KNOWN,)))


def test_what_is_new_is_named_and_what_is_known_refused(policy) -> None:
    assert script.what_is_new(policy, replace(KNOWN, network="b")) == "network"
    assert script.what_is_new(policy, replace(KNOWN, budgets={"params": 0.1})) == "budget"
    other = replace(KNOWN, dataset="cifar100", network="c", formats=("cp",))
    assert script.what_is_new(policy, other) == "network, dataset, format"
    with pytest.raises(ConfigError, match="trained on this very task"):
        script.what_is_new(policy, KNOWN)


def test_scores_are_the_accuracies_of_batches(small_problem, small_evaluator) -> None:
    choices = tuple(small_problem.preset.tolist())
    found = script.scored(small_evaluator, choices)
    assert len(found) == 3
    assert found.mean() == pytest.approx(small_evaluator(choices).accuracy)


def test_tasks_are_read_from_six_parts() -> None:
    asked = script.Asked.parse("resnet20:a.th:cifar10:cp:macs:0.4")
    assert asked == script.Asked("resnet20", Path("a.th"), "cifar10", "cp", "macs", 0.4)
    assert asked.candidates == CandidateOptions(("cp",))
    assert [asked.kept(measure) for measure in script.MEASURES] == [None, 0.4, None]
    for text in ("resnet20", "resnet20:a.th:cifar10:cp:macs:much"):
        with pytest.raises(argparse.ArgumentTypeError, match="MODEL:CHECKPOINT"):
            script.Asked.parse(text)
    with pytest.raises(argparse.ArgumentTypeError, match="MEASURE is one of params, macs, bytes"):
        script.Asked.parse("resnet20:a.th:cifar10:cp:time:0.4")


def test_a_task_may_join_formats_precisions_and_small_factors() -> None:
    asked = script.Asked.parse("resnet20:a.th:cifar10:cp+tucker+float32+int8_weights:bytes:0.1")
    assert asked.candidates == CandidateOptions(("cp", "tucker"), ("float32", "int8_weights"))
    ring = replace(asked, tensor_format="tensor_ring+tensorised")
    assert ring.candidates == CandidateOptions(("tensor_ring",), tensorised=True)
    thinner = replace(asked, tensor_format="cp+channels")
    assert thinner.candidates == CandidateOptions(("cp",), channels=script.KEPT_CHANNELS)


def test_the_table_names_what_the_policy_was_trained_on(policy) -> None:
    rows = [
        script.Row(replace(KNOWN, network="b"), "network", 0.7, 0.02, 0.004, None),
        script.Row(replace(KNOWN, network="c"), "network", 0.5, -0.01, 0.006, (0.6, 0.61), (0.7, 0.72)),
    ]
    text = script.report(rows, policy)
    assert "Mean gain +0.0050; better on 1 of 2 tasks." in text
    assert "| 0.700 | 0.720 | +0.020 ± 0.004 | – | – | – | – |" in text
    assert "| -0.010 ± 0.006 | 0.6000 | 0.6100 | 0.7000 | 0.7200 |" in text
    assert "refit" not in script.report(rows[:1], policy).splitlines()[0]
    assert "trained on 1 tasks: resnet20 on cifar10, tucker, 0.25 of params" in text


def test_a_whole_task_is_measured(policy, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANKRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(script, "CALIBRATION_IMAGES", 64)
    data = load_dataset("digits", seed=0)
    torch.manual_seed(0)
    model = create_model("conv4", input_shape=data.input_shape, num_classes=data.classes)
    save_checkpoint(model, tmp_path / "conv4.safetensors")
    policy.save(tmp_path / "policy.safetensors")
    asked = script.Asked("conv4", tmp_path / "conv4.safetensors", "digits", "tucker", "params", 0.2)
    row = script.measured(asked, tmp_path / "policy.safetensors", skip=0, refit=True, seed=0, finetune=1)
    assert row.new == "network, dataset, budget"
    assert 0 <= row.greedy <= 1
    assert row.refit is not None
    assert row.finetuned is not None
    assert np.isfinite([row.gain, row.error, *row.refit, *row.finetuned]).all()
