"""The story's page, pictures and files belong together, and it is told with the public API alone."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import story
from matplotlib.image import imread
from torch import nn

import rankrl
from decomposition import Factorise, count_macs, count_parameters
from rankrl.data import load_dataset

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "scripts"
BUDGET = 0.4
STAGES = (
    "dense",
    "decomposed",
    "decomposed, fine-tuned",
    "pruned, decomposed",
    "pruned, decomposed, fine-tuned",
    "decomposed, fine-tuned, contracted",
    "pruned, decomposed, fine-tuned, contracted",
)


def small() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
        *(nn.Conv2d(12, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)),
    )


@pytest.fixture(scope="module")
def folder(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """The folder of a story on digits, told once."""

    def tell(path: Path) -> None:
        arguments = ["--folder", str(path), "--budget", str(BUDGET), "--episodes", "3", "--epochs", "1"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["scripts/story.py", *arguments])
            patch.setattr(story, "create_model", lambda name, **_: small())
            story.main()
        sys.modules.pop("story_page")

    return made_once("story", tell)


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "story.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def summary(page: str) -> dict[str, list[str]]:
    """The cells of each row of the last table, by stage."""
    table = [line for line in page.partition("## Summary")[2].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    return {name: cells for name, *cells in rows}


def onnx_file(folder: Path, stage: str) -> Path:
    return folder / f"{stage.replace(', ', '-')}.onnx"


def test_the_page_tells_all_chapters_its_command_and_the_hardware(page: str, folder: Path) -> None:
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert [heading[:3] for heading in headings] == [*(f"{n}. " for n in range(1, 8)), "Sum"]
    assert f"python scripts/story.py --budget {BUDGET}" in page
    assert f"onnxruntime {onnxruntime.__version__}" in page
    assert str(folder) not in page


def test_every_picture_is_there_and_drawn(page: str, folder: Path) -> None:
    named = re.findall(r"!\[[^]]+\]\((images/[^)]+)\)", page)
    assert sorted(named) == sorted(f"images/{path.name}" for path in (folder / "images").iterdir())
    assert len(named) == 6
    for name in named:
        pixels = imread(folder / name)[..., :3]
        assert pixels.shape[1] >= 800
        assert 0.01 < (pixels.min(axis=2) < 0.9).mean() < 0.5  # neither empty nor a solid block


def test_accuracies_in_the_summary_are_those_of_the_files(
    summary: dict[str, list[str]], folder: Path
) -> None:
    assert tuple(summary) == STAGES
    data = load_dataset("digits")
    test = data.test.for_report()
    mean, std = (np.array(each, dtype=np.float32)[:, None, None] for each in (data.mean, data.std))
    images = ((test.x.numpy() / np.float32(255) - mean) / std).astype(np.float32)
    for stage, (accuracy, _, _, size, *_) in summary.items():
        file = onnx_file(folder, stage)
        session = onnxruntime.InferenceSession(file)
        scores = session.run(None, {session.get_inputs()[0].name: images})[0]
        assert accuracy == f"{(scores.argmax(1) == test.y.numpy()).mean():.2%}", stage
        assert size == f"{file.stat().st_size / 1000:,.0f} kB", stage
    assert float(summary["dense"][0].rstrip("%")) > 50


def test_costs_in_the_summary_are_those_of_the_networks(summary: dict[str, list[str]], folder: Path) -> None:
    loaded, plan = rankrl.load_compressed(small(), folder / "small.safetensors")
    assert plan.chosen(rankrl.KeepChannels)
    assert {each.format for each in plan.chosen(Factorise).values()} == {"tucker"}
    for stage, network in (("dense", small()), ("pruned, decomposed, fine-tuned", loaded)):
        assert summary[stage][1] == f"{count_parameters(network):,}"
        assert summary[stage][2] == f"{count_macs(network, (1, 8, 8)) / 1e6:.2f} M"
    params = {stage: int(cells[1].replace(",", "")) for stage, cells in summary.items()}
    assert all(count <= BUDGET * params["dense"] for stage, count in params.items() if stage != "dense")
    assert params["decomposed, fine-tuned, contracted"] == params["decomposed"]


def test_latencies_lie_within_their_spread(summary: dict[str, list[str]]) -> None:
    for *_, latency, ratio in summary.values():
        median, low, high = map(float, re.findall(r"[\d.]+", latency))
        assert low <= median <= high
        assert ratio == "unchanged" or abs(float(ratio) - 1) > 0.025


def test_the_script_uses_the_public_api_alone() -> None:
    tree = ast.parse((SCRIPTS / "story.py").read_text(encoding="utf-8"))
    used = [
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("decomposition", "pruning", "rankrl")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("decomposition", "rankrl")):
            used += [(str(node.module), alias.name) for alias in node.names]
    reporting = ("rankrl.report.markdown", "rankrl.report.provenance")  # what scripts share
    for module, name in used:
        assert module in reporting or name in importlib.import_module(module).__all__, (module, name)
    assert len(used) > 30
