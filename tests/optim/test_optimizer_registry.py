"""The registry: one list for configurations and tests."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from optim import (
    OnnxAdagrad,
    OnnxAdam,
    create_optimizer,
    list_optimizers,
    optimizer_record,
    register_optimizer,
    registry,
)


def test_the_three_optimizers_are_registered_under_their_names() -> None:
    assert list_optimizers() == ["onnx_adagrad", "onnx_adam", "sgd"]
    assert list_optimizers("onnx_*") == ["onnx_adagrad", "onnx_adam"]
    classes = {name: type(create_optimizer(name, [torch.zeros(1)])) for name in list_optimizers()}
    assert classes == {"onnx_adagrad": OnnxAdagrad, "onnx_adam": OnnxAdam, "sgd": torch.optim.SGD}


@pytest.mark.parametrize("name", list_optimizers())
def test_a_record_describes_and_its_options_create(name: str) -> None:
    record = optimizer_record(name)
    assert record.name == name
    assert len(record.description) > 20
    optimizer = create_optimizer(name, [torch.zeros(1)], **record.options)
    assert optimizer.defaults["lr"] == record.options["lr"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.name = "other"


def test_unknown_names_and_options_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'adamw'.*onnx_adagrad, onnx_adam, sgd"):
        create_optimizer("adamw", [torch.zeros(1)])
    with pytest.raises(TypeError, match=r"'sgd' has no option alpha.*momentum"):
        create_optimizer("sgd", [torch.zeros(1)], alpha=0.9)


def test_a_new_optimizer_is_one_decorated_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_records", dict(registry._records))

    @register_optimizer("rprop", "Resilient backpropagation, torch's own")
    def rprop(params: list[torch.Tensor], lr: float = 0.01) -> torch.optim.Optimizer:
        return torch.optim.Rprop(params, lr=lr)

    assert "rprop" in list_optimizers()
    assert create_optimizer("rprop", [torch.zeros(1)], lr=0.5).defaults["lr"] == 0.5
    with pytest.raises(ValueError, match="'rprop' is registered already"):
        register_optimizer("rprop", "once more")


@pytest.mark.parametrize("options", [{"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov_that_does_not_go_with_the_rest_is_told_what_to_do(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"got momentum=0\..*; set nesterov=false"):
        create_optimizer("sgd", [torch.zeros(1)], nesterov=True, **options)
    assert create_optimizer("sgd", [torch.zeros(1)], nesterov=False, **options).defaults["nesterov"] is False
