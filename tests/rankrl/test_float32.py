"""Networks of other types and of several, in float32 and back."""

import copy
from pathlib import Path

import pytest
import torch
from call_options import layer_options
from torch import nn
from torch.nn import functional as F

import rankrl
from decomposition import load_compressed
from rankrl import export_onnx
from rankrl.device import back_in, in_float32, own_types
from rankrl.onnx.export import verify_onnx

TYPES = [torch.float16, torch.bfloat16, torch.float64]


class Mixed(nn.Module):
    """Convolutions in another type, the norm and the last layer in float32, as mixed precision has it."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.dtype = dtype
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False, dtype=dtype)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1, dtype=dtype)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.dtype))
        x = self.norm(x.float()).relu()
        x = self.second(x.to(dtype=self.dtype)).relu()
        x = x + torch.zeros(1, dtype=self.dtype)
        return self.last(x.mean((2, 3)).float())


def plain(dtype: torch.dtype) -> nn.Sequential:
    layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4)
    return nn.Sequential(*layers).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("network", [Mixed, plain])
def test_a_copy_computes_in_float32_whatever_its_forward_casts_to(
    network: type[nn.Module], dtype: torch.dtype
) -> None:
    model = network(dtype).eval()
    x = torch.randn(4, 3, 8, 8, dtype=dtype)
    types, before = own_types(model), model(x)
    wide = in_float32(model)
    assert set(own_types(wide).values()) == {torch.float32}
    assert own_types(model) == types
    assert copy.deepcopy(wide)(x.float()).dtype == torch.float32
    torch.testing.assert_close(wide(x.float()), before.float(), rtol=0.05, atol=0.01)
    again = back_in(wide, types)
    assert type(again) is type(model)
    assert own_types(again) == types
    torch.testing.assert_close(again(x), before, rtol=0, atol=1e-6 if dtype == torch.float64 else 0)


def test_a_network_in_float32_keeps_what_its_forward_casts_to() -> None:
    model = Mixed(torch.float64).float()
    model.first.double()
    assert in_float32(model, keep_double=True).first.weight.dtype == torch.float64
    assert type(in_float32(plain(torch.float32))) is nn.Sequential


@pytest.mark.parametrize(
    ("network", "dtype"),
    [
        (Mixed, torch.bfloat16),
        (plain, torch.float16),
        (plain, torch.float64),
        pytest.param(Mixed, torch.float16, marks=pytest.mark.slow),
        pytest.param(Mixed, torch.float64, marks=pytest.mark.slow),
        pytest.param(plain, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_files_of_other_types_compute_in_float32(
    network: type[nn.Module], dtype: torch.dtype, tmp_path: Path
) -> None:
    model, x = network(dtype).eval(), torch.randn(5, 3, 8, 8, dtype=dtype)
    export_onnx(model, tmp_path / "model.onnx", x)
    assert verify_onnx(model, tmp_path / "model.onnx", x) < 1e-4


@pytest.mark.usefixtures("staged_files", "no_report")
@pytest.mark.parametrize(
    ("model", "precisions", "finetune"),
    [
        pytest.param(plain(torch.float16), ("float32",), None, marks=pytest.mark.slow),
        pytest.param(plain(torch.float64), ("float32",), 1, marks=pytest.mark.slow),
        (Mixed(), ("float32", "int8"), 1),
    ],
    ids=["float16", "float64", "mixed"],
)
def test_compress_hands_a_network_back_in_its_own_types(
    model: nn.Module, precisions: tuple[str, ...], finetune: int | None, tmp_path: Path
) -> None:
    model.eval()
    dtype = next(model.parameters()).dtype
    x = torch.randn(80, 3, 8, 8, dtype=dtype)
    labels = model(x).argmax(1)
    seen: list[dict[str, torch.dtype]] = []

    def score(network: nn.Module) -> float:
        seen.append(own_types(network))
        return -float(F.cross_entropy(network(x).float(), labels))

    result = rankrl.compress(
        model,
        [(x, labels)],
        tmp_path,
        params=0.7,
        finetune=finetune,
        score=score,
        timing=rankrl.LatencyOptions(batch=2, runs=2),
        progress=False,
        decomposition=layer_options(candidates=4, precisions=precisions),
    )
    assert result.verified < 1e-3
    assert result.after["params"] <= 0.7 * result.before["params"]
    kinds = {name.split(".")[0]: kind for name, kind in own_types(model).items()}
    for types in (*seen, own_types(result.model)):
        layers = {name.split(".")[0]: kind for name, kind in types.items() if "range" not in name}
        assert layers.items() <= kinds.items()
    anew = copy.deepcopy(model)
    if not isinstance(model, Mixed):  # whose forward casts to types that its layers must have
        anew = anew.float()
    loaded, _ = load_compressed(anew, tmp_path / "model.safetensors")
    assert own_types(loaded) == own_types(result.model)
    torch.testing.assert_close(loaded.eval()(x), result.model(x), rtol=0, atol=0)
