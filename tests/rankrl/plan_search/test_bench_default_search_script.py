"""The benchmark of the default search knows its rows again, and runs each search as a command."""

from __future__ import annotations

import json
from pathlib import Path

import bench_default_search as script
import pytest
from result_rows import ResultRows

pytestmark = pytest.mark.slow


def test_rows_are_measured_once_and_shown_as_means(tmp_path: Path, monkeypatch, capsys) -> None:
    commands: list[list[str]] = []

    def run(words: list[str], *, check: bool) -> None:
        commands.append(words)
        folder = Path(next(word for word in words if word.startswith("hydra.run.dir=")).partition("=")[2])
        folder.mkdir(parents=True)
        numbers = {"search": {"episodes": 6, "seconds": 1.5}, "compressed": {"accuracy": 0.5}}
        (folder / "metrics.json").write_text(json.dumps(numbers))

    monkeypatch.setattr(script.subprocess, "run", run)
    words = ["--quick", "--cell", "cifar10", "--seeds", "0", "1", "--output", str(tmp_path / "rows.csv")]
    script.main(words)
    assert len(commands) == 1 + 2 * (len(script.SEARCHES) - 1)
    script.main(words)
    assert len(commands) == 1 + 2 * (len(script.SEARCHES) - 1)
    assert "| cifar10 | default | 2 | 6 | 2 | 50.00 ± 0.00 |" in capsys.readouterr().out
    rows = ResultRows(tmp_path / "rows.csv", script.KEY, script.VALUES)
    assert rows.find({"cell": "cifar10", "search": "greedy", "seed": 0})


def test_the_recorded_rows_can_be_read() -> None:
    path = Path(script.__file__).parent / "results/bench_default_search.csv"
    rows = ResultRows(path, script.KEY, script.VALUES)
    assert "| cifar100 | default | 5 |" in script.report(rows)
