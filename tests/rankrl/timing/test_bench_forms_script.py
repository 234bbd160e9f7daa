"""The benchmark of forms times all files of a network, and layers by rank."""

from __future__ import annotations

import bench_forms
import pytest

pytestmark = pytest.mark.slow


def test_a_row_a_network_and_one_a_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "bench_forms.py --tasks conv4:8:2:tucker:0.5 --ranks 6 9 --batch 2 --runs 2"
    monkeypatch.setattr("sys.argv", command.split())
    monkeypatch.setattr(bench_forms, "SHAPES", ((8, 6),))
    bench_forms.main()
    rows = [
        line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line[:2] == "| "
    ]
    (network, *times), *ranks = (row for row in rows if row[0] not in ("network", "layer"))
    assert network == "conv4, 8 x 8"
    assert all(float(each) > 0 for each in times[1:])
    assert [row[:3] for row in ranks] == [["8, 6 x 6", "cp", rank] for rank in ("6", "9")]
    assert all(float(each) >= 0 for row in ranks for each in row[3:])
