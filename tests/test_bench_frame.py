"""Sections, CSV files, command and machine that measuring scripts publish."""

from pathlib import Path

import bench_frame
import pytest
from bench_frame import hardware_line, shown_command, write_section

from rankrl.errors import counted
from rankrl.report import collect_setup, run_folder


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 cores"), (1, "1 core"), (2, "2 cores"), (1024, "1,024 cores")]
)
def test_one_is_singular(count: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(count, "core") == text
    for module in (bench_frame, run_folder):
        monkeypatch.setattr(module, "usable_cores", lambda: count)
    assert collect_setup(["rankrl"], 0)["Processor"].endswith(f", {text}")
    assert f", {text}, " in hardware_line()


def test_only_the_marked_section_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.md"
    write_section(path, "one", "One", "first")
    path.write_text(f"intro\n\n{path.read_text()}\noutro\n")
    write_section(path, "two", "Two", "other")
    write_section(path, "one", "One", "second")
    text = path.read_text()
    assert text.startswith("intro\n")
    assert [word in text for word in ("outro", "second", "other", "first")] == [True, True, True, False]
    assert [file.name for file in tmp_path.iterdir()] == ["benchmarks.md"]


def test_a_csv_file_gets_the_tables_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write_section(path, "one", "One", "`python bench.py`\n\n| a | b |\n|---|---:|\n| x, y | 1 |")
    assert path.read_text() == '# `python bench.py`\na,b\n"x, y",1\n'


def test_half_a_pair_of_markers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.md"
    path.write_text("<!-- one:start -->")
    with pytest.raises(ValueError, match="put the other one back"):
        write_section(path, "one", "One", "text")


def test_nothing_of_this_machine_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RANKRL_DATA", "/mnt/mine")
    words = ["bench.py", "--checkpoint", "/mnt/a b.th", "--rows", "/tmp/rows", "--part", "fits"]
    found = shown_command(words, shortened={"/mnt/a b.th": "a b.th"}, dropped=["--rows"])
    assert found == "RANKRL_DATA=data OMP_NUM_THREADS=1 python bench.py --checkpoint 'a b.th' --part fits"
