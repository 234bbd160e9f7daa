"""One output of several quantities: none of them is lost unseen, in modules and files alike."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from call_options import grouped
from torch import nn

import rankrl

OPTIONS: dict[str, Any] = {
    "candidates": 4,
    "iterations": 10,
    "final_iterations": 10,
    "timing": rankrl.LatencyOptions(batch=2, runs=2, int8=False),
}


class Detector(nn.Module):
    """Boxes in pixels beside class scores, (N, 4 + 20, anchors)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.ReLU(), nn.Conv2d(24, 32, 3, 2, 1), nn.ReLU())
        self.box = nn.Sequential(nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 4, 1))
        self.scores = nn.Sequential(nn.Conv2d(32, 48, 3, 1, 1), nn.ReLU(), nn.Conv2d(48, 20, 1))
        with torch.no_grad():
            weight, bias = self.scores[2].parameters()
            weight.mul_(12)
            bias.fill_(-2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stem(images)
        boxes, scores = self.box(features).sigmoid() * 640, self.scores(features).sigmoid()
        return torch.cat([boxes.flatten(2), scores.flatten(2)], 1)


class Pose(nn.Module):
    """Joints in pixels beside their confidences, (N, joints, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU())
        self.place, self.sure = (
            nn.Linear(48, 34),
            nn.Sequential(nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 17)),
        )
        with torch.no_grad():
            next(self.sure[2].parameters()).mul_(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.stem(x)
        places = 320 + 300 * self.place(features).unflatten(1, (17, 2))
        return torch.cat([places, self.sure(features).sigmoid()[..., None]], 2)


NETWORKS: dict[str, tuple[type[nn.Module], tuple[int, ...], list[Any], list[str]]] = {
    "detector": (Detector, (3, 16, 16), [np.s_[:, :4], np.s_[:, 4:]], ["0:4", "4:24"]),
    "pose": (Pose, (24,), [np.s_[..., :2], np.s_[..., 2]], ["0:2", "2"]),
}


@pytest.mark.usefixtures("staged_files")
@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("network", ["pose", pytest.param("detector", marks=pytest.mark.slow)])
@pytest.mark.parametrize("goal", ["drop", pytest.param("bytes", marks=pytest.mark.slow)])
def test_no_quantity_is_lost_unseen(network: str, as_file: bool, goal: str, tmp_path: Path) -> None:
    kind, shape, parts, channels = NETWORKS[network]
    torch.manual_seed(0)
    net, x, test = kind().eval(), 2 * torch.randn(160, *shape), 2 * torch.randn(100, *shape)
    given: Any = net
    inputs: Any = x
    if as_file:
        rankrl.export_onnx(net, tmp_path / "net.onnx", x[:2])
        given, inputs = tmp_path / "net.onnx", x.numpy()
    options = grouped(decomposition="tucker", precisions=("float32", "int8"), **OPTIONS)
    wanted: dict[str, Any] = {"bytes": 0.2} if goal == "bytes" else {"drop": 0.02, "minimise": "bytes"}
    target = tmp_path / ("small.onnx" if as_file else "run")
    result = rankrl.compress(given, inputs, target, progress=False, **wanted, **options)
    session = onnxruntime.InferenceSession(result.path)
    after: Any = session.run(None, {session.get_inputs()[0].name: test.numpy()})[0]
    with torch.no_grad():
        before = net(test).numpy()
    kept = []
    for part in parts:
        lost = np.square(before[part] - after[part]).mean() / before[part].var(0, ddof=1).mean()
        kept.append(1 - lost)
    (output,) = result.outputs
    assert [unit.channels for unit in output.units] == channels
    assert [unit.score for unit in output.units] == pytest.approx(kept, abs=0.1)
    assert output.score == min(unit.score for unit in output.units)
    assert min(kept) > (0.5 if goal == "bytes" else 0.95)
    if not as_file:
        told = json.loads((tmp_path / "run" / "metrics.json").read_text())["outputs"][output.name]
        assert told["units"][channels[0]]["score"] == output.units[0].score
        assert told["worst"] in {f"{output.name}[{each}]" for each in channels}
