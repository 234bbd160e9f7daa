"""Writing the report into a run folder, and what is refused there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rankrl.errors import StorageError
from rankrl.report import EPISODE_COLUMNS, EpisodeRow, LayerRow, ReportError, read_episodes, write_report
from rankrl.training import EpochRow


def test_a_run_folder_gets_a_page_and_its_plots_of_the_same_bytes_each_time(
    run_folder: Path, layers: Sequence[LayerRow], epochs: Sequence[EpochRow]
) -> None:
    page = write_report(run_folder, layers=layers, epochs=epochs, setup={"Seed": "0"})
    assert page == run_folder / "report.html"
    assert page.read_text(encoding="utf-8").endswith("</html>\n")
    plots = sorted((run_folder / "plots").iterdir())
    assert [path.name for path in plots] == ["finetune.png", "layers.png", "reward.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)
    first = page.read_bytes()
    assert write_report(run_folder, layers=layers, epochs=epochs, setup={"Seed": "0"}).read_bytes() == first


def test_plots_of_missing_parts_are_not_written(run_folder: Path) -> None:
    (run_folder / "episodes.csv").unlink()
    write_report(run_folder)
    assert not (run_folder / "plots").exists()


def test_episodes_are_read_as_they_were_written(run_folder: Path, episodes: Sequence[EpisodeRow]) -> None:
    assert read_episodes(run_folder) == list(episodes)


def test_a_folder_without_metrics_is_no_finished_run(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"no metrics\.json"):
        write_report(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null", "\x00"])
def test_damaged_metrics_are_refused(run_folder: Path, content: str) -> None:
    (run_folder / "metrics.json").write_text(content)
    with pytest.raises(ReportError, match=r"metrics\.json"):
        write_report(run_folder)
    assert not (run_folder / "report.html").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace("reward,", "prize,", 1), "lacks the columns reward"),
        (lambda text: "", "lacks the columns"),
        (lambda text: text + "7,nan,1,1,1,1,1,9,False,1,search,[]\n", r"line 122: reward is 'nan'"),
        (lambda text: text + "7,0.5\n", r"line 122: score is None"),
        (lambda text: text + "x,0.5,1,1,1,1,1,9,False,1,search,[]\n", r"line 122: episode is 'x'"),
    ],
)
def test_damaged_episodes_are_refused(run_folder: Path, damage: Callable[[str], str], message: str) -> None:
    path = run_folder / "episodes.csv"
    path.write_text(damage(path.read_text()))
    with pytest.raises(ReportError, match=message):
        write_report(run_folder)
    assert not (run_folder / "report.html").exists()


def test_episodes_that_are_no_text_are_refused(run_folder: Path) -> None:
    (run_folder / "episodes.csv").write_bytes(",".join(EPISODE_COLUMNS).encode() + b"\n\xff\xfe")
    with pytest.raises(ReportError, match=r"cannot read .*episodes\.csv"):
        write_report(run_folder)


@pytest.mark.usefixtures("undrawn")
def test_a_folder_that_cannot_be_written_is_refused(run_folder: Path, layers: Sequence[LayerRow]) -> None:
    (run_folder / "plots").write_text("in the way")
    with pytest.raises(StorageError, match="plots"):
        write_report(run_folder, layers=layers)
    assert not (run_folder / "report.html").exists()
