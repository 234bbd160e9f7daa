"""The optimizer's step of a compressed network, carried out by onnx's reference evaluator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from decomposition import apply_plan, make_plan
from optim import OnnxAdam
from rankrl.errors import ConfigError
from rankrl.training import TrainingRecipe
from rankrl.training.networks import write_training_step


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))
    return apply_plan(model, make_plan(model, (3, 6, 6), "tucker", ranks=2))


def test_the_file_does_what_the_optimizer_does(network: nn.Module, tmp_path: Path) -> None:
    recipe = TrainingRecipe(lr=1e-2, optimizer="onnx_adam")
    write_training_step(network, recipe, tmp_path / "step.onnx")
    model = onnx.load(tmp_path / "step.onnx")
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    network(torch.randn(8, 3, 6, 6)).square().mean().backward()
    optimizer = OnnxAdam(network.parameters(), lr=recipe.lr)
    feeds: dict[str, np.ndarray] = {}
    for entry in model.graph.input:
        name, _, role = entry.name.rpartition(".")
        if entry.name.startswith("R_"):
            feeds[entry.name] = np.array(recipe.lr)
        elif entry.name.startswith("T_"):
            feeds[entry.name] = np.array(optimizer.param_groups[0]["first_update_count"], dtype=np.int64)
        elif role == "X":
            feeds[entry.name] = before[name].numpy()
        elif role == "G":
            feeds[entry.name] = dict(network.named_parameters())[name].grad.numpy()
        else:
            feeds[entry.name] = np.zeros_like(before[name].numpy())
    names = [output.name for output in model.graph.output]
    results = dict(zip(names, ReferenceEvaluator(model).run(None, feeds), strict=True))
    optimizer.step()
    for name, parameter in network.named_parameters():
        np.testing.assert_allclose(results[f"{name}.X_new"], parameter.detach(), rtol=1e-5, atol=1e-7)


def test_an_optimizer_that_is_no_operator_is_refused(network: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"export\.training=true.*'sgd' is none"):
        write_training_step(network, TrainingRecipe(optimizer="sgd"), tmp_path / "step.onnx")
