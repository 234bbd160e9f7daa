"""Bad input is refused with an error that names the argument."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from optim import (
    OnnxAdagrad,
    OnnxAdam,
    OnnxOptimizer,
    SparseGradientError,
    create_optimizer,
    list_optimizers,
    optimizer_record,
    register_optimizer,
    registry,
)

CLASSES = [OnnxAdam, OnnxAdagrad]
NUMBERS = [(cls, name) for cls in CLASSES for name in ("lr", *cls.attributes)]


def one_param(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(2, 3, dtype=dtype)]


@pytest.mark.parametrize(("cls", "name"), NUMBERS)
@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf, -math.inf])
def test_negative_and_not_finite_numbers_are_refused(
    cls: type[OnnxOptimizer], name: str, value: float
) -> None:
    with pytest.raises(ValueError, match=f"^{name} is "):
        cls(one_param(), **{name: value})
    optimizer = cls(one_param())
    with pytest.raises(ValueError, match=f"^{name} is "):
        optimizer.add_param_group({"params": one_param(), name: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("cls", "name"), NUMBERS)
@pytest.mark.parametrize("value", ["0.1", None, 1j, True, [0.1]])
def test_what_is_no_number_is_refused(cls: type[OnnxOptimizer], name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"^{name} is "):
        cls(one_param(), **{name: value})


@pytest.mark.parametrize("name", ["alpha", "beta"])
@given(value=st.one_of(st.floats(min_value=1.0, allow_nan=False), st.just(1 - 1e-9)))
def test_a_decay_of_one_or_more_is_refused_also_after_rounding(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} is "):
        OnnxAdam(one_param(), **{name: value})


@pytest.mark.parametrize("value", [1e39, 1e-50])
def test_what_float32_cannot_hold_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"epsilon is .*float32"):
        OnnxAdam(one_param(), epsilon=value)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("first_update_count", -1, ValueError),
        ("first_update_count", 0.5, TypeError),
        ("first_update_count", True, TypeError),
        ("lr", torch.tensor([0.1, 0.2]), ValueError),
        ("lr", torch.tensor(1), TypeError),
        ("lr", torch.tensor(-0.1), ValueError),
        ("lr", torch.tensor(math.nan), ValueError),
    ],
)
def test_an_update_count_is_an_integer_from_zero_and_a_learning_rate_tensor_one_good_number(
    cls: type[OnnxOptimizer], name: str, value: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"^{name} is "):
        cls(one_param(), **{name: value})


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ((torch.float16, torch.bfloat16), r"params\[0\].*keep float32 masters"),
        ((torch.int64, torch.bool, torch.complex64), r"params\[0\] is torch\."),
    ],
)
def test_other_types_of_parameters_are_refused(
    cls: type[OnnxOptimizer], dtypes: tuple[torch.dtype, ...], message: str
) -> None:
    for dtype in dtypes:
        with pytest.raises(TypeError, match=message):
            cls(one_param(dtype))


@pytest.mark.parametrize("cls", CLASSES)
def test_a_refused_group_leaves_the_optimizer_as_it_was(cls: type[OnnxOptimizer]) -> None:
    optimizer = cls(one_param())
    with pytest.raises(TypeError, match=r"params\[0\]"):
        optimizer.add_param_group({"params": one_param(torch.float16)})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("error", [SparseGradientError, TypeError, RuntimeError])
def test_sparse_gradients_are_refused(cls: type[OnnxOptimizer], error: type[Exception]) -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = cls(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(error, match=r"params\[0\].*sparse"):
        optimizer.step()


@pytest.mark.parametrize("cls", CLASSES)
def test_a_state_of_another_optimizer_or_model_is_refused(cls: type[OnnxOptimizer]) -> None:
    param = nn.Parameter(torch.zeros(2, 3))
    other = torch.optim.Adam([param])
    optimizer = cls([param])
    with pytest.raises(ValueError, match="param group 0 of the state lacks first_update_count"):
        optimizer.load_state_dict(other.state_dict())
    transposed = nn.Parameter(torch.zeros(3, 2))
    transposed.grad = torch.ones(3, 2)
    saved = cls([transposed])
    saved.step()
    with pytest.raises(ValueError, match="has shape"):
        optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.state


@pytest.mark.parametrize("cls", CLASSES)
def test_a_state_of_a_negative_count_is_refused(cls: type[OnnxOptimizer]) -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    optimizer = cls([param])
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["step"] = -3
    with pytest.raises(ValueError, match="step of a parameter in group 0 is -3"):
        optimizer.load_state_dict(state)


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
