"""The table of results runs what is missing, stops in time, goes on, and says what is not finished."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import results
import yaml
from command_line import QUICK, check_overrides, small_network, workplace

pytestmark = pytest.mark.slow

GRID = {
    "recipe": ["selector=greedy", "finetune=full", "tracking=none"],
    "networks": {"small, digits": {"options": [], "checkpoint": "small.safetensors"}},
    "cells": [
        {
            "name": "cp",
            "network": "small, digits",
            "method": "CP, half",
            "options": ["decomposition=cp", "budget.params=0.5"],
            "goal": 91.3,
            "published": [{"method": "theirs", "accuracy": 90.9, "base": 91.4, "cost": "-50 %"}],
        },
        {
            "name": "control",
            "network": "small, digits",
            "method": "dense",
            "options": ["decomposition=cp", "budget.params=1.0"],
        },
    ],
}


def written(folder: Path, grid: object = GRID) -> Path:
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(grid))
    return path


def test_the_grid_that_ships_is_read() -> None:
    cells = results.read_grid(results.GRID, Path("checkpoints"), 60)
    assert len({cell.name for cell in cells}) == len(cells)
    first = cells[0]
    assert (first.epochs, first.seed, first.goal) == (60, 0, 91.3)
    assert "model.checkpoint=checkpoints/cifar10-resnet20.th" in first.options
    assert "finetune=full" in first.options
    (taught,) = (cell for cell in cells if cell.name == "resnet20-cp-4x-taught-0")
    assert "finetune.teacher=[checkpoints/cifar10-resnet56.th]" in taught.options
    assert "finetune.teacher_model=[resnet56]" in taught.options
    (by_two,) = (cell for cell in cells if cell.name == "resnet56-cp-4x-taught-0")
    assert "finetune.teacher_model=[resnet56,resnet32]" in by_two.options
    assert {cell.network for cell in cells if "-taught" in cell.name} == {
        cell.network for cell in cells if "control-taught" in cell.name
    }
    (scratch,) = (cell for cell in cells if cell.name == "resnet20-from-scratch-0")
    assert scratch.epochs == 0
    assert not any(option.startswith("model.checkpoint") for option in scratch.options)
    # Every network whose checkpoint is compressed has the dense one trained on beside it.
    compressed = {cell.network for cell in cells if "finetune=full" in cell.options}
    assert compressed == {cell.network for cell in cells if "control" in cell.name}


def test_the_grid_of_budgets_in_time_is_read() -> None:
    cells = results.read_grid(results.GRID.with_name("latency.yaml"), Path("checkpoints"), 1)
    assert [cell.epochs for cell in cells[:4]] == [8, 12, 8, 1]
    assert all(any(option.startswith("budget.latency=") for option in cell.options) for cell in cells)
    shared = "decomposition.rank_multiple=16"
    assert all(shared in cell.options for cell in cells)


@pytest.mark.parametrize("name", ["results.yaml", "latency.yaml"])
def test_no_cell_asks_for_what_would_be_ignored(name: str) -> None:
    for cell in results.read_grid(results.GRID.with_name(name), Path("checkpoints"), 60):
        check_overrides(cell.options)


def test_a_run_without_epochs_is_a_row_like_the_others() -> None:
    metrics = {
        "baseline": {"accuracy": 0.9},
        "compressed": {"accuracy": 0.8},
        "finetuned": {"accuracy": 0.8},
        "ratios": {"params": 4.0, "macs": 2.0, "latency": 2.0},
        "onnx": {"baseline_file_bytes": 40, "file_bytes": 10},
    }
    record = results.record_of(metrics)
    assert (record["epochs"], record["before"], record["after"], record["file"]) == (0, 0.8, 0.8, 4.0)
    trained = results.record_of({**metrics, "trainings": {"finetune": {"epochs": 3}}})
    assert trained["epochs"] == 3


def test_what_a_grid_cannot_mean_is_refused(tmp_path: Path) -> None:
    unknown = {**GRID, "cells": [{**GRID["cells"][0], "network": "another"}]}
    with pytest.raises(SystemExit, match=r"cell 'cp' is of the network 'another'; there are small, digits"):
        results.read_grid(written(tmp_path, unknown), tmp_path, 1)
    twice = {**GRID, "cells": [GRID["cells"][0]] * 2}
    with pytest.raises(SystemExit, match="two cells of the name cp-0"):
        results.read_grid(written(tmp_path, twice), tmp_path, 1)


def test_cells_are_run_once_and_stand_beside_what_was_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    with workplace(tmp_path):
        others = ("model=", "train.", "finetune.", "search.episodes")
        options = [*(each for each in QUICK if not each.startswith(others)), *small_network(tmp_path)[:2]]
        grid = {
            **GRID,
            "networks": {"small, digits": {"options": options, "checkpoint": "small.safetensors"}},
        }
        command = ["--grid", str(written(tmp_path, grid)), "--checkpoints", str(tmp_path), "--epochs", "1"]
        assert results.main([*command, "--hours", "0"]) == 0
        assert "Not finished: cp-0, control-0." in capsys.readouterr().out
        assert results.main([*command, "--cells", "cp", "--output", "page.md"]) == 0
        text = capsys.readouterr().out
        assert "theirs: 90.9 from 91.4 (-50 %)" in text
        assert "Not finished: control-0." in text
        assert text.strip() in Path("page.md").read_text()
        metrics = json.loads(Path("results/cp-0/metrics.json").read_text())
        assert f"| {100 * metrics['finetuned']['accuracy']:.2f} |" in text
        before = Path("results/cp-0/metrics.json").stat().st_mtime_ns
        # The dense network in place of a compressed one, by the same recipe.
        assert results.main(command) == 0
        assert Path("results/cp-0/metrics.json").stat().st_mtime_ns == before
        control = json.loads(Path("results/control-0/metrics.json").read_text())
        assert control["ratios"]["params"] == 1
        assert "Not finished" not in capsys.readouterr().out
        # What a finished run did is told, not what this call would do.
        assert results.main([*command, "--table-only", "--epochs", "9"]) == 0
        found = [line.split(" | ")[2] for line in capsys.readouterr().out.splitlines() if "digits" in line]
        assert found == ["1", "1"]
        # The records outlive the folder, and one cell may have rows of several lengths.
        shutil.copy("results/results.csv", "kept.csv")
        kept = Path("kept.csv").read_text().splitlines()
        Path("kept.csv").write_text("\n".join([*kept, kept[1].replace("cp-0,1,", "cp-0,2,"), ""]))
        elsewhere = ["--table-only", "--folder", "empty", "--records", "kept.csv"]
        assert results.main([*command, *elsewhere]) == 0
        lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "digits" in line]
        assert [line[2] for line in lines] == ["1", "2", "1"]
        assert lines[0][4:] == lines[1][4:]


def test_a_running_cell_is_interrupted_in_time_and_a_failing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = "import signal, time\nsignal.signal(signal.SIGINT, lambda *_: exit(130))\ntime.sleep(60)"
    commands = {"long-0": [sys.executable, "-c", waits], "bad-0": [sys.executable, "-c", "exit(1)"]}
    monkeypatch.setattr(results.Cell, "command", lambda self, folder: commands[self.name])
    cells = [results.Cell(name, "n", "m", (), 1, 0) for name in ("bad-0", "long-0")]
    sent = []
    send = subprocess.Popen.send_signal
    monkeypatch.setattr(
        subprocess.Popen, "send_signal", lambda self, number: (sent.append(number), send(self, number))
    )
    assert results.run_cells(cells, tmp_path, jobs=2, seconds=2) == ["bad-0"]
    assert sent == [signal.SIGINT]
