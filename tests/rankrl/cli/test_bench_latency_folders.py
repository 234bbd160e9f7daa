"""The benchmark of budgets in time takes finished runs as rows, and times their files in turns."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_latency
import pytest
from command_line import read_json

from rankrl.timing.latency import TimedTurns, time_in_turns

pytestmark = pytest.mark.slow
SMALL = ["--runs", "2", "--repeats", "3"]


def _run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_latency.py", "--folders", str(folder), *map(str, arguments)])
    bench_latency.main()


def test_rows_hold_what_runs_wrote_down_and_times_of_their_files(
    whole_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Three comparisons: dense, integers, the run's file. Each is timed, and then said to have taken this:
    milliseconds = iter([(20.0, 10.0, 8.0), (10.0, 4.0, 3.0), (30.0, 12.0, 15.0)])

    def known(*args: Any, **options: Any) -> TimedTurns:
        found = time_in_turns(*args, **options)
        assert found.times.shape == (2, 3)
        pairs = zip(found.latencies, next(milliseconds), strict=True)
        return replace(found, latencies=[replace(each, ms=time) for each, time in pairs])

    monkeypatch.setattr(bench_latency, "time_in_turns", known)
    page = tmp_path / "page.md"
    _run(monkeypatch, whole_run, *SMALL, "--output", page)
    text = capsys.readouterr().out.strip()
    assert text in page.read_text()
    _, _, dense, integers, row = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    )
    metrics = read_json(whole_run / "metrics.json")
    assert dense[:6] == [metrics["model"], "dense", "", "1", "2.50", "20.0"]
    assert integers[1:6] == ["dense, int8", "", "0.400", "1", "10.0"]
    # The middle one of the three ratios, not the ratio of middle times.
    assert row[3:6] == ["0.400 (0.300 to 0.500)", "0.80", "8.0"]
    shown = [metrics["compressed"], metrics["finetuned"], metrics["onnx"]]
    assert row[6:9] == [f"{each['accuracy']:.2%}" for each in shown]
    assert row[9] == str(metrics["trainings"]["finetune"]["epochs"])
    assert f"{metrics['ratios']['params']:.2f}x fewer" in row
    assert row[1].endswith(", float32")
    assert row[2] == ""  # no budget in time


def test_what_has_no_file_to_time_is_refused(
    training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="is no finished run: it has no metrics"):
        _run(monkeypatch, tmp_path)
    with pytest.raises(SystemExit, match="has written no ONNX file that could be timed"):
        _run(monkeypatch, training)
