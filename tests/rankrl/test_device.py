"""Precision is bfloat16 only where it is native, and parameters never change type."""

from __future__ import annotations

import pytest
import torch

from rankrl.device import Precision, exact_float32, inference_precision, model_device, select_device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_in_the_precision_and_keeps_parameters(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(3, 2)
    with Precision(torch.device("cpu"), dtype).autocast():
        assert layer(torch.ones(1, 3)).dtype == dtype
    assert layer.weight.dtype == torch.float32


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        Precision(torch.device("cpu"), torch.float16)


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "avx2": True}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_bfloat16_is_used_where_the_cpu_has_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert inference_precision(torch.device("cpu")).dtype == dtype


def test_the_device_is_cuda_exactly_when_there_is_one() -> None:
    assert select_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert inference_precision().device == select_device()


def test_a_model_without_tensors_is_on_the_cpu() -> None:
    assert model_device(torch.nn.ReLU()) == torch.device("cpu")
    assert model_device(torch.nn.Linear(1, 1, device="meta")) == torch.device("meta")


def test_exact_float32_restores_what_was_set() -> None:
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    with exact_float32():
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before
