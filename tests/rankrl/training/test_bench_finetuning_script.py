"""The table of what fine-tuning's parts are worth: a row a variant, from one decomposed network."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import bench_finetuning as bench
import pytest
from command_line import SmallNetwork
from torch import nn

from rankrl.data import load_dataset
from rankrl.models import save_checkpoint
from rankrl.training import TrainingRecipe

pytestmark = pytest.mark.slow


def checkpoint(folder: Path, heldout: str | None) -> tuple[Path, nn.Module]:
    data = load_dataset("digits", seed=0)
    model = SmallNetwork(data.classes)
    path = folder / "dense.safetensors"
    save_checkpoint(model, path, heldout=heldout)
    return path, model


def test_variants_begin_alike_and_finished_rows_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = checkpoint(tmp_path, load_dataset("digits", seed=0).heldout.digest())
    few = [bench.VARIANTS[0], bench.Variant("plain", TrainingRecipe(lr=1e-3, restore_best=False))]
    monkeypatch.setattr(bench, "VARIANTS", few)
    monkeypatch.setattr(
        bench, "create_model", lambda name, input_shape, num_classes: SmallNetwork(num_classes)
    )
    rows, page = tmp_path / "rows.csv", tmp_path / "page.md"
    command = ["--checkpoint", str(path), "--dataset", "digits", "--rows", str(rows)]
    command += ["--format", "spatial_svd", "--fraction", "0.5", "--calibration", "32"]
    command += ["--epochs", "2", "--images", "300"]
    bench.main([*command, "--variants", "plain"])
    first = rows.read_text()
    bench.main([*command, "--output", str(page)])
    with rows.open() as file:
        found = list(csv.DictReader(file))
    assert rows.read_text().startswith(first)
    assert [row["variant"] for row in found] == ["plain", few[0].name]
    assert len({(row["before"], row["dense"]) for row in found}) == 1
    # Another seed of one row: a mean and its range.
    bench.main([*command, "--variants", "plain", "--seeds", "0", "1"])
    with rows.open() as file:
        tests = [float(row["test"]) for row in csv.DictReader(file) if row["variant"] == "plain"]
    line = next(line for line in capsys.readouterr().out.splitlines()[::-1] if line.startswith("| plain"))
    mean = f"{sum(tests) / 2:.2f} | {min(tests):.2f} to {max(tests):.2f} |"
    assert line.startswith("| plain | 2 | 300 | 2 |")
    assert line.endswith(mean)
    assert page.read_text().index(few[0].name) < page.read_text().index("plain")
    assert "rows.csv" in page.read_text()


def test_a_checkpoint_that_saw_the_held_out_images_chooses_no_rate(tmp_path: Path) -> None:
    path, _ = checkpoint(tmp_path, None)
    with pytest.raises(SystemExit, match="may have been trained on the held-out images"):
        bench.main(
            [
                "--checkpoint",
                str(path),
                "--model",
                "conv4",
                "--dataset",
                "digits",
                "--rows",
                str(tmp_path / "r"),
            ]
        )


def test_every_variant_differs_from_the_recipe_in_its_part_alone() -> None:
    assert len({variant.name for variant in bench.VARIANTS}) == len(bench.VARIANTS)
    assert len({repr(replace(variant, name="")) for variant in bench.VARIANTS}) == len(bench.VARIANTS)
