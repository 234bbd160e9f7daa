"""`rankrl.compress`, `search` and `apply_plan`: modules and files by the same calls."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import rankrl
from decomposition import list_formats
from rankrl.data import load_dataset
from rankrl.errors import ConfigError
from rankrl.models import create_model
from rankrl.plan_search.scores.evaluation import CANDIDATES_FILE

IMAGES = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
QUICK: dict[str, Any] = {
    "timing": rankrl.LatencyOptions(batch=2, runs=2),
    "decomposition": rankrl.DecompositionOptions(
        format="tucker", candidates=3, iterations=3, final_iterations=3
    ),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3), nn.Flatten(), nn.Linear(192, 4))
    return nn.Sequential(*layers).eval()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "net.onnx"
    rankrl.export_onnx(network(), path, (3, 8, 8))
    return path


@pytest.fixture
def kinds(file: Path) -> dict[str, tuple[Any, Any]]:
    return {"module": (network(), IMAGES), "file": (file, IMAGES.numpy())}


@pytest.mark.usefixtures("staged_files")  # which form of a file is faster, the clock would say anew
@pytest.mark.parametrize("kind", ["module", "file"])
def test_a_folder_gets_everything_and_a_file_the_network_alone(
    kind: str, kinds: dict[str, tuple[Any, Any]], tmp_path: Path
) -> None:
    given, inputs = kinds[kind]
    whole = rankrl.compress(given, inputs, tmp_path / "run", params=0.6, **QUICK)
    alone = rankrl.compress(given, inputs, tmp_path / "alone" / "small.onnx", params=0.6, **QUICK)
    assert {each.name for each in (tmp_path / "alone").iterdir()} == {"small.onnx"}
    assert alone.path == tmp_path / "alone" / "small.onnx"
    assert alone.plan.layers == whole.plan.layers
    assert whole.path == tmp_path / "run" / "model.onnx"
    written = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert written["compressed"]["params"] == whole.after["params"] < 0.6 * whole.before["params"]
    assert (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "plan.json").exists()
    answers = [
        onnxruntime.InferenceSession(str(path)).run(None, {"input": IMAGES[:2].numpy()})[0]
        for path in (whole.path, alone.path)
    ]
    np.testing.assert_array_equal(*answers)
    with pytest.raises(ConfigError, match="holds a run with another configuration"):
        rankrl.compress(given, inputs, tmp_path / "run", params=0.5, **QUICK)


@pytest.mark.parametrize("kind", ["module", "file"])
def test_a_search_and_its_plan_are_the_halves(
    kind: str, kinds: dict[str, tuple[Any, Any]], tmp_path: Path
) -> None:
    given, inputs = kinds[kind]
    score = (lambda _: 0.5) if kind == "module" else None
    result = rankrl.search(given, inputs, score=score, params=0.6, selector="greedy", **QUICK)
    whole = rankrl.compress(given, inputs, tmp_path / "small.onnx", params=0.6, **QUICK)
    if kind == "module":
        small = rankrl.apply_plan(given, result.plan, inputs)
        assert sum(each.numel() for each in small.parameters()) < whole.before["params"]
        return
    assert result.plan.layers == whole.plan.layers
    again = rankrl.apply_plan(given, result.plan, inputs, tmp_path / "again.onnx", **QUICK)
    assert again.after["params"] == whole.after["params"]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("module", {"images": rankrl.ImagePreprocessing(size=8)}, "images= means nothing for PyTorch"),
        ("file", {"finetune": 1}, "finetune= means nothing for ONNX files"),
        ("file", {"test": IMAGES}, "test= means nothing for ONNX files"),
        ("file", {"heldout": IMAGES}, "heldout is the share of a file's inputs"),
        ("module", {"folder": "other"}, "is the folder of the run already; leave folder= out"),
    ],
)
def test_what_means_nothing_is_refused(
    kind: str, options: dict[str, Any], message: str, kinds: dict[str, tuple[Any, Any]], tmp_path: Path
) -> None:
    given, inputs = kinds[kind]
    with pytest.raises(ConfigError, match=message):
        rankrl.compress(given, inputs, tmp_path / "run", params=0.6, **QUICK, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["module", "file"])
def test_what_may_be_lost_takes_the_place_of_a_budget(
    kind: str, kinds: dict[str, tuple[Any, Any]], tmp_path: Path
) -> None:
    given, inputs = kinds[kind]
    result = rankrl.compress(given, inputs, tmp_path / "run", drop=0.2, minimise="bytes", **QUICK)
    assert result.search is not None
    measured = {plan.name: plan for plan in result.search.measured}
    best = next(plan for plan in measured.values() if plan.key == result.search.key)
    assert best.loss <= 0.2
    assert not any(plan.dominates(best) for plan in measured.values())
    assert measured["all dense"].cost == 1
    assert result.after["bytes"] < result.before["bytes"]
    written = json.loads((tmp_path / "run" / "metrics.json").read_text())["search"]["measured"]
    assert [row["name"] for row in written] == [
        plan.name for plan in sorted(measured.values(), key=lambda plan: (plan.cost, plan.loss))
    ]
    again = rankrl.compress(given, inputs, tmp_path / "run", drop=0.2, minimise="bytes", **QUICK)
    assert again.plan.layers == result.plan.layers
    with pytest.raises(ConfigError, match="holds a run with another configuration"):
        rankrl.compress(given, inputs, tmp_path / "run", drop=0.1, minimise="bytes", **QUICK)


@pytest.mark.parametrize(
    ("kind", "formats"),
    [("module", {"cp", "tucker", "tensor_ring", "pifa"}), ("file", {"cp", "tucker", "spatial_svd", "pifa"})],
)
def test_auto_chooses_among_formats_that_nobody_has_to_list(
    kind: str, formats: set[str], kinds: dict[str, tuple[Any, Any]], tmp_path: Path
) -> None:
    auto = rankrl.DecompositionOptions(format="auto", candidates=2, iterations=2)
    given, inputs = kinds[kind]
    rankrl.search(given, inputs, score=lambda _: 1.0, params=0.6, decomposition=auto, folder=tmp_path)
    text = (tmp_path / CANDIDATES_FILE).read_text()
    offered = {name for name in list_formats() if name in text}  # those that pay on this network
    assert len(offered) > 1
    assert offered <= formats


@pytest.mark.usefixtures("staged_files")
def test_a_data_set_brings_its_own_images_and_score(tmp_path: Path) -> None:
    data, timing = load_dataset("digits"), rankrl.LatencyOptions(batch=2, runs=2, int8=False)
    model = create_model("conv4", input_shape=data.input_shape, num_classes=data.classes)
    given = {**QUICK, "params": 0.5, "timing": timing}
    found = rankrl.compress(model, data, tmp_path / "run", calibration=64, **given)
    written = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (written["dataset"], written["selector"]) == ("digits", "greedy")
    assert written["onnx"]["accuracy"] == pytest.approx(written["finetuned"]["accuracy"], abs=0.01)
    assert found.plan.metadata["preprocessing"] == data.preprocessing.to_dict()
    with pytest.raises(ConfigError, match="score= means nothing for a data set"):
        rankrl.compress(model, data, tmp_path / "other", score=lambda network: 1.0, **given)
