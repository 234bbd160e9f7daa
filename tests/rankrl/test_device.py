"""Precision is bfloat16 only where it is native, and parameters never change type."""

import pytest
import torch

from rankrl.device import (
    Precision,
    accepted_layout,
    device_note,
    exact_float32,
    in_layout,
    inference_precision,
    model_device,
    select_device,
    to_fastest_layout,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_in_the_precision_and_keeps_parameters(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(3, 2)
    with Precision(torch.device("cpu"), dtype).autocast():
        assert layer(torch.ones(1, 3)).dtype == dtype
    assert layer.weight.dtype == torch.float32


def test_the_device_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankrl.device.select_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_note().startswith("computes on the CPU (")
    assert device_note().endswith("torch sees no CUDA device with CUDA_VISIBLE_DEVICES=")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert device_note().endswith("this torch is built without CUDA")


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        Precision(torch.device("cpu"), torch.float16)


@pytest.mark.parametrize(
    ("processor", "capabilities", "dtype"),
    [
        ("AMD EPYC", {"avx512_bf16": True}, torch.bfloat16),
        ("Intel(R) Xeon(R) Processor", {"avx512_bf16": True}, torch.float32),
        ("Intel(R) Xeon(R) Processor", {"avx512_bf16": True, "amx_bf16": True}, torch.bfloat16),
        ("Neoverse-V2", {"bf16": True}, torch.bfloat16),
        ("AMD EPYC", {"avx512_bf16": False, "avx2": True}, torch.float32),
        ("", {}, torch.float32),
    ],
)
def test_bfloat16_is_used_where_the_cpu_is_faster_with_it(
    monkeypatch: pytest.MonkeyPatch, processor: str, capabilities: dict[str, bool], dtype: torch.dtype
) -> None:
    monkeypatch.setattr("rankrl.device.processor_name", lambda: processor)
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


class Flattening(torch.nn.Module):
    """Flattens feature maps by `view`, which only contiguous ones allow, or by `flatten`."""

    def __init__(self, channels: int, by_view: bool) -> None:
        super().__init__()
        self.conv, self.by_view = torch.nn.Conv2d(channels, 8, 3), by_view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y.view(len(y), -1) if self.by_view else y.flatten(1)


@pytest.mark.parametrize("channels", [1, 3])  # the strides of one channel fit either order
def test_channels_last_is_for_networks_that_take_it(channels: int) -> None:
    images = torch.randn(4, channels, 6, 6)
    for by_view in (True, False):
        model = Flattening(channels, by_view)
        expected, before = model(images), model.conv.weight.clone()
        layout = to_fastest_layout(model, images[:2])
        assert layout == (torch.contiguous_format if by_view else torch.channels_last)
        assert model.training
        torch.testing.assert_close(model(in_layout(images, layout)), expected)
        assert torch.equal(model.conv.weight, before)
        assert accepted_layout(Flattening(channels, by_view), images[:2]) == layout


@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 3, 4, 4), (2, 3, 1, 1)])
def test_a_layout_is_that_of_the_strides(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for layout in (torch.channels_last, torch.contiguous_format):
        expected = torch.empty(shape, memory_format=layout).stride()
        moved = in_layout(in_layout(x, torch.channels_last), layout)
        assert moved.stride() == expected
        assert torch.equal(moved, x)
