"""What `rankrl.compress` and `rankrl.search` make of the data that they are given."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
import torch
from call_options import grouped, layer_options
from centring import Centre
from torch import nn
from torchvision import tv_tensors

import decomposition
import rankrl
from decomposition import DecompositionError
from rankrl.data.sample import Sample, read_samples
from rankrl.errors import ConfigError, DataError
from rankrl.training import train_on
from rankrl.verify.measure import HeldoutScore

pytestmark = pytest.mark.usefixtures("staged_files", "no_report")

IMAGES = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(0))
QUICK: dict[str, Any] = {"timing": rankrl.LatencyOptions(batch=4, runs=2), "candidates": 4, "progress": False}


def classifier(*first: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.ReLU()
    return nn.Sequential(
        *first, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4, bias=False)
    ).eval()


@pytest.mark.slow
def test_network_that_changes_its_inputs_is_compressed_like_one_that_does_not(tmp_path: Path) -> None:
    found = []
    for in_place, kind in ((False, torch.clone), (True, tv_tensors.Image)):
        given = kind(IMAGES.clone())
        result = rankrl.compress(
            classifier(Centre(in_place=in_place)),
            given,
            tmp_path / f"{in_place}{kind.__name__}",
            params=0.6,
            finetune=rankrl.TrainingRecipe(epochs=1, batch_size=16),
            test=given,
            **grouped(**QUICK),
        )
        assert torch.equal(given, IMAGES)
        assert result.verified < 1e-4
        found.append(result)
    before, after = found
    assert [layer.operations for layer in after.plan] == [layer.operations for layer in before.plan]
    assert after.epochs[0].loss == pytest.approx(before.epochs[0].loss, rel=1e-4)
    assert after.score == pytest.approx(before.score)
    assert after.test == pytest.approx(before.test)


def test_search_leaves_its_inputs_as_they_were() -> None:
    given = nn.Parameter(IMAGES.clone())
    found = rankrl.search(
        classifier(Centre(in_place=True)),
        score=lambda network: 0.5,
        inputs=given,
        params=0.6,
        selector="random",
        decomposition=layer_options(candidates=4),
        search=rankrl.SearchOptions(episodes=2, finalists=2),
    )
    assert found.plan.chosen(decomposition.Factorise)
    assert torch.equal(given, IMAGES)


class Detections(NamedTuple):
    boxes: torch.Tensor
    logits: torch.Tensor
    size: tuple[int, ...]


class Detector(nn.Module):
    """Returns several tensors by name, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.boxes, self.logits = nn.Conv2d(3, 24, 3), nn.Conv2d(24, 4, 3), nn.Conv2d(24, 2, 3)

    def forward(self, images: torch.Tensor) -> Detections:
        features = torch.relu(self.body(images))
        return Detections(self.boxes(features), self.logits(features), tuple(images.shape[2:]))


def test_outputs_are_compared_and_exported_by_the_names_that_the_network_gives_them(tmp_path: Path) -> None:
    result = rankrl.compress(Detector(), IMAGES, tmp_path, params=0.6, finetune=1, **grouped(**QUICK))
    names = [each.name for each in onnx.load(result.path).graph.output]
    assert names == [each.name for each in result.outputs] == ["boxes", "logits"]
    held = IMAGES[torch.randperm(60, generator=torch.Generator().manual_seed(0))[:12].sort().values]
    with torch.no_grad():
        expected, found = Detector()(held), result.model(held)
    explained = []
    for output, before, after in zip(result.outputs, expected, found, strict=False):
        assert output.error == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-3)
        explained.append(float(1 - (after - before).square().mean() / before.var(0).mean()))
    assert result.score == pytest.approx(sum(explained) / 2, rel=1e-3)
    assert list(json.loads((tmp_path / "metrics.json").read_text())["outputs"]) == names


CLASSES = torch.arange(60) % 4


class Centred(nn.Module):
    """Centres images in place before a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = Centre(in_place=True), classifier()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rest(self.first(x))
        return y


def test_score_gets_the_same_inputs_for_every_plan() -> None:
    given, kept = IMAGES.clone(), Centred().eval()(IMAGES.clone())
    seen = []

    def score(network: nn.Module) -> float:
        seen.append(float((network(given) - kept).square().mean()))
        return -seen[-1]

    options: Any = {"decomposition": "tucker", "params": 0.6, "selector": "random", "episodes": 3}
    rankrl.search(Centred(), score=score, inputs=given, **grouped(candidates=4, finalists=2, **options))
    assert seen[0] == 0
    assert torch.equal(given, IMAGES)


def labelled(labels: Any, images: torch.Tensor = IMAGES) -> list[Any]:
    return [(images, labels)]


def with_nan(index: int) -> torch.Tensor:
    images = IMAGES.clone()
    images[index, 0, 0, 0] = float("nan")
    return images


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"inputs": labelled(CLASSES + 1)},
            DataError,
            "data: labels run from 1 to 4, .* 4 outputs: 0 to 3; give labels - 1",
        ),
        (
            {"inputs": labelled(CLASSES * 2)},
            DataError,
            "data: labels run from 0 to 6, .*number the classes from 0",
        ),
        (
            {"inputs": labelled(CLASSES - 1)},
            DataError,
            "labels run from -1 to 2, .*-100 for inputs without one",
        ),
        ({"inputs": labelled(CLASSES * 0 - 100)}, DataError, "no input has a label"),
        (
            {"inputs": labelled(CLASSES), "test": labelled(CLASSES + 1)},
            DataError,
            "test: labels run from 1 to 4",
        ),
        (
            {"inputs": labelled((CLASSES + 1).double()), "finetune": 1},
            DataError,
            "data: labels run from 1 to 4",
        ),
        ({"inputs": labelled(CLASSES[:30])}, DataError, "60 inputs, but 30 labels"),
        ({"inputs": labelled({"y": CLASSES[:30]})}, DataError, "60 inputs, but 30 labels"),
        (
            {"inputs": labelled(["a"] * 60)},
            DataError,
            "data: labels must be one tensor .* they hold str; torch.as_tensor",
        ),
        ({"inputs": labelled({"y": CLASSES}), "finetune": 1}, ConfigError, "labels are a dict, .*give loss="),
        (
            {"inputs": with_nan(7)},
            DecompositionError,
            r"data holds NaN .* in an input, first in number 7 \(from 0\)",
        ),
        ({"heldout": 60}, DataError, "heldout is 60, of 60 inputs; give more inputs"),
        ({"heldout": True}, ConfigError, "heldout is True"),
        ({"heldout": 1.5}, ConfigError, "heldout is 1.5; .* a number of them"),
        ({"heldout": with_nan(5)}, DecompositionError, "heldout holds NaN .* number 5"),
        ({"test": with_nan(9)}, DecompositionError, "test holds NaN .* number 9"),
        ({"test": IMAGES[:, :1]}, DecompositionError, r"test: .* layer '0' \(Conv2d\) takes 3 channels"),
        ({"inputs": (IMAGES * 40 + 100).byte()}, DecompositionError, r"data: .*x.float\(\) / 255"),
        ({"inputs": list(IMAGES)}, DecompositionError, r"data: .*torch.stack\(inputs\)"),
        ({"heldout": IMAGES.numpy()}, DecompositionError, "given as a ndarray"),
    ],
)
def test_data_that_cannot_work_is_refused_first(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    def export(*_: object, **__: object) -> None:
        raise AssertionError("a file was written")

    monkeypatch.setattr("rankrl.verify.file_export.export_onnx", export)
    with pytest.raises(error, match=message):
        rankrl.compress(
            **grouped(
                **{"network": classifier(), "inputs": IMAGES, "target": tmp_path, "params": 0.6, **change}
            )
        )


def test_network_whose_outputs_are_not_finite_is_refused_first(tmp_path: Path) -> None:
    model = classifier()
    with torch.no_grad():
        model[-1].weight[2] = float("inf")
    with pytest.raises(
        DataError, match="heldout: the network's own output is NaN or infinite for some of the inputs 0 to 11"
    ):
        rankrl.compress(model, IMAGES, tmp_path, params=0.6)
    with pytest.raises(ConfigError, match=r"one tensor of class scores.*give loss="):
        rankrl.compress(Detector(), labelled(CLASSES), tmp_path, params=0.6, finetune=1)


def read(data: Any, **options: Any) -> tuple[Sample, Sample, Sample | None]:
    reads: Any = {"skip": (), "only": (), "score_reads_classes": True, "loss_reads_classes": True}
    return read_samples(data, 0.2, None, classifier(), 0, **reads | options)


def test_labels_of_classes_may_be_floats_or_missing() -> None:
    expected = read(labelled(CLASSES))
    for kind in (torch.float32, torch.float64, torch.uint8):
        for sample, other in zip(read(labelled(CLASSES.to(kind))), expected, strict=True):
            assert sample is other is None or torch.equal(sample.labels, other.labels)  # type: ignore[union-attr]
    values = read(labelled(CLASSES / 3), loss_reads_classes=False)[0]
    assert values.labels.is_floating_point()
    partly = torch.where(torch.arange(60) < 20, -100, CLASSES)
    fitted, held, _ = read(labelled(partly))
    assert len(fitted.labelled()) + len(held.labelled()) == 40
    assert len(fitted) + len(held) == 60
    model = classifier()
    with torch.no_grad():
        some = held.labelled()
        accuracy = float((model(some.inputs).argmax(1) == some.labels).float().mean())
    assert HeldoutScore(model, held)(model) == pytest.approx(accuracy)


def test_labels_in_a_nesting_reach_the_loss_in_batches() -> None:
    labels = {"class": CLASSES, "box": (torch.randn(60, 4), torch.ones(60))}
    fitted, held, _ = read((IMAGES, labels), loss_reads_classes=False)
    assert held.labels["box"][0].shape == (12, 4)
    seen = []

    def loss(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
        boxes, weights = targets["box"]
        assert boxes.shape == (len(outputs), 4)
        seen.append(len(weights))
        return nn.functional.cross_entropy(outputs, targets["class"])

    recipe = rankrl.TrainingRecipe(epochs=2, batch_size=16)
    train_on(classifier(), fitted.inputs, fitted.labels, recipe, score=lambda _: 0.5, loss=loss)
    assert seen == [16, 16, 16] * 2


def test_gaps_that_the_network_masks_are_compressed_around(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.seeing, self.behind, self.last = nn.Linear(6, 24), nn.Linear(24, 24), nn.Linear(24, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = torch.where(x.isnan().any(-1, keepdim=True), torch.zeros(()), self.seeing(x))
            y: torch.Tensor = self.last(torch.relu(self.behind(torch.relu(features))).mean(1))
            return y

    x = torch.randn(60, 5, 6, generator=torch.Generator().manual_seed(0))
    x[::7, 2] = float("nan")
    with pytest.raises(DecompositionError, match=r"9 of 60 inputs, first in number 0 .*skip=\['seeing'\]"):
        rankrl.compress(Masked(), x, tmp_path, params=0.7, **grouped(**QUICK))
    result = rankrl.compress(Masked(), x, tmp_path, params=0.7, **grouped(skip=["seeing"], **QUICK))
    assert result.after["params"] <= 0.7 * result.before["params"]
    assert result.verified < 1e-4
    with torch.no_grad():
        assert result.model(x).isfinite().all()
