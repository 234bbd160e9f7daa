"""The scripts behind the pruning figures compare like with like, and go on where they stopped."""

import csv
from functools import partial
from pathlib import Path

import bench_frame
import bench_pruning as bench
import pruning_curves as curves
import pytest
import torch
from torch import nn

from rankrl.models import create_model
from rankrl.models.zoo import CifarResNet
from rankrl.timing import compare_latency

pytestmark = pytest.mark.slow


def test_curves_are_written_point_by_point_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(curves, "create_model", lambda name, **_: tiny())
    arguments = ["--dataset", "digits", "--images", "64", "--points", "2", "--dense-seeds", "1"]
    arguments += ["--epochs", "1", "--mask-epochs", "1", "--finetune-epochs", "1"]
    arguments += ["--output-folder", str(tmp_path), "--pictures", str(tmp_path)]
    find = curves.prune_network

    class Killed(BaseException):
        pass

    def kill(network: nn.Module, data: object, options: object, images: object) -> None:
        if options.pruner == "magnitude":
            raise Killed
        return find(network, data, options, images)

    monkeypatch.setattr(curves, "prune_network", kill)
    with pytest.raises(Killed):
        curves.main(arguments)
    with (tmp_path / "pruning_curves_digits.csv").open(newline="") as file:
        before = list(csv.DictReader(file))
    assert [row["method"] for row in before] == [
        *("dense", "dense_longer", "group_lasso", "hard_concrete", "first_k")
    ]
    monkeypatch.setattr(curves, "prune_network", find)
    curves.main(arguments)
    with (tmp_path / "pruning_curves_digits.csv").open(newline="") as file:
        after = list(csv.DictReader(file))
    assert after[: len(before)] == before
    assert len(after) == 2 + 2 * len(curves.LABELS)
    for row in after:
        if row["method"] in curves.LABELS:
            assert float(row["removed"]) >= float(row["target"]) - 0.001
    picture = (tmp_path / "pruning_curves_digits.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    capsys.readouterr()
    curves.main(arguments)
    assert "removed," not in capsys.readouterr().out  # nothing is measured again


def tiny() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(54, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


def test_conv6_is_longer_and_wider_than_conv4() -> None:
    conv6 = curves.Conv6((3, 32, 32), 100).eval()
    conv4 = create_model("conv4", input_shape=(3, 32, 32), num_classes=100)
    sizes = [sum(p.numel() for p in network.parameters()) for network in (conv6, conv4)]
    assert sizes[0] > sizes[1]
    assert conv6(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_projected_shortcuts_compute_the_zero_padding() -> None:
    torch.manual_seed(0)
    network = create_model("resnet20", input_shape=(3, 16, 16), num_classes=10).eval()
    images = torch.randn(32, 3, 16, 16)
    projected = bench.with_projections(network, images)
    assert isinstance(projected.layer2[0].shortcut, nn.Sequential)
    with torch.no_grad():
        torch.testing.assert_close(projected(images), network(images), atol=1e-4, rtol=1e-4)
        one = projected.layer2[0].shortcut.train()(network.layer1(network.conv1(images)))
        assert torch.isfinite(one).all()


def test_the_benchmark_brings_every_pruner_to_the_same_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch_pruning")

    def small(name: str, **_: object) -> CifarResNet:
        torch.manual_seed(0)  # how well channels divide among so few depends on the weights
        return CifarResNet(1, 1, 10)

    monkeypatch.setattr(bench_frame, "create_model", small)
    monkeypatch.setattr(bench, "compare_latency", partial(compare_latency, batch=8, runs=3))
    output = tmp_path / "bench.csv"
    arguments = [
        "--dataset",
        "digits",
        "--models",
        "resnet20",
        "--pruners",
        "first_k",
        "--rewound",
        "group_lasso",
        "--multiples",
        "apoz",
        "--option-b",
        "magnitude",
    ]
    arguments += ["--images", "128", "--mask-epochs", "1", "--finetune-epochs", "1", "--output", str(output)]
    bench.main(arguments)
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["shortcut"], row["pruner"]) for row in rows] == [
        ("A", "first_k"),
        ("A", "group_lasso, rewound"),
        ("A", "apoz, multiples of 8"),
        ("B", "magnitude"),
        ("B", "Torch-Pruning magnitude"),
        ("B", "Torch-Pruning group norm"),
    ]
    kept = {(row["shortcut"], row["pruner"]): float(row["kept_macs"]) for row in rows}
    assert all(0.35 < each <= 0.5 for each in kept.values()), kept
    assert all(float(row["latency"]) > 0 for row in rows)
    assert capsys.readouterr().out.count("| resnet20 |") == 6
    bench.main(arguments)
    assert "resnet20 A first_k:" not in capsys.readouterr().out
