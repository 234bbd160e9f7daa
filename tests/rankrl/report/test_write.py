"""The page of a run: complete, self-contained, and only of what the run has."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from html_outline import outline

from rankrl.errors import StorageError
from rankrl.plan_search.scores.evaluation import EPISODE_COLUMNS, EpisodeRow
from rankrl.report import LayerRow, ReportError, RunReport, conclusion, run_page, write_report
from rankrl.report.figures import plan_drawing
from rankrl.report.run_folder import read_episodes
from rankrl.report.run_tables import before_after
from rankrl.training import EpochRow


@pytest.fixture(scope="module")
def document(whole_run: RunReport) -> str:
    return run_page(whole_run)


def test_a_whole_run_has_every_section(document: str) -> None:
    expected = ["Before and after", "Search", "Layers", "Fine-tuning", "ONNX file", "Setup"]
    assert outline(document).headings == expected


def test_the_table_shows_each_stage_and_the_change(document: str) -> None:
    cells = [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in outline(document).cells]
    start = cells.index("Test accuracy")
    assert cells[start : start + 20] == [
        *("Test accuracy", "91.73 %", "74.12 %", "90.56 %", "−1.17 points"),
        *("Parameters", "269,722", "107,689", "107,689", "2.50× fewer"),
        *("MACs", "40.55 M", "19.46 M", "19.46 M", "2.08× fewer"),
        *("Latency", "23.1 ms", "–", "17.6 ms", "1.31× faster"),
    ]


def test_every_layer_has_its_row(document: str, layers: Sequence[LayerRow]) -> None:
    cells = outline(document).cells
    for layer in layers:
        start = cells.index(layer.name)
        assert cells[start + 1] == "×".join(map(str, layer.shape))
        assert cells[start + 2] == (", ".join(map(str, layer.ranks)) or "–")
        assert cells[start + 3 : start + 5] == [f"{layer.params_before:,}", f"{layer.params_after:,}"]
        assert cells[start + 9] == layer.reason


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("missing", "gone"),
    [
        ({"episodes": ()}, {"Search"}),
        ({"epochs": ()}, {"Fine-tuning"}),
        ({"layers": ()}, {"Layers"}),
        ({"setup": {}}, {"Setup"}),
        ({"metrics": {"model": "resnet20"}}, {"Before and after", "ONNX file"}),
    ],
)
def test_what_a_run_has_not_is_left_out(
    missing: dict[str, Any], gone: set[str], whole_run: RunReport, document: str
) -> None:
    without = outline(run_page(dataclasses.replace(whole_run, **missing))).headings
    assert set(outline(document).headings) - set(without) >= gone


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_ranks_or_errors_has_no_columns_for_them(metrics: Mapping[str, Any]) -> None:
    row = LayerRow("conv", (8, 3, 3, 3), (), 216, 108, 9000, 4500)
    cells = outline(run_page(RunReport(metrics, [row]))).cells
    assert "Parameters before" in cells
    assert not {"Ranks", "Relative error", "Left dense because"} & set(cells)


@pytest.mark.usefixtures("undrawn")
def test_layers_of_several_formats_name_theirs(metrics: Mapping[str, Any]) -> None:
    rows = [
        LayerRow(name, (8, 3, 3, 3), (2,), 216, 108, 9000, 4500, format=name) for name in ("cp", "tucker")
    ]
    page = outline(run_page(RunReport(metrics, rows)))
    assert {"Format, ranks", "cp 2", "tucker 2"} <= set(page.cells)
    alone = outline(run_page(RunReport(metrics, rows[:1])))
    assert {"Ranks", "2"} <= set(alone.cells)


@pytest.mark.usefixtures("undrawn")
def test_a_layer_that_lost_only_inputs_is_not_called_dense(metrics: Mapping[str, Any]) -> None:
    stays = "all its output channels stay"
    rows = [
        LayerRow("first", (8, 3, 3, 3), (), 216, 216, 9000, 9000, reason=stays, channels=(8, 8)),
        LayerRow("cut", (8, 8, 3, 3), (), 576, 288, 9000, 4500, channels=(4, 8)),
        LayerRow("reader", (8, 8, 3, 3), (), 576, 288, 9000, 4500, reason=stays, channels=(8, 8)),
    ]
    page = run_page(RunReport(metrics, rows))
    assert "3 layers, 1 left dense" in page
    assert {"Outputs stay because", stays} <= set(outline(page).cells)


@pytest.mark.usefixtures("undrawn")
def test_dense_layers_in_integers_are_counted_apart(metrics: Mapping[str, Any]) -> None:
    rows = [
        LayerRow("first", (8, 3, 3, 3), (), 216, 216, 9000, 9000, precision="int8"),
        LayerRow("second", (8, 8, 3, 3), (2,), 576, 144, 9000, 2250, precision="int8"),
        LayerRow("third", (8, 8, 3, 3), (), 576, 576, 9000, 9000, reason="left dense by the plan"),
    ]
    assert "3 layers, 1 dense, in integers, 1 left dense" in run_page(RunReport(metrics, rows))


def test_warnings_stand_above_the_numbers(metrics: dict[str, Any]) -> None:
    page = run_page(RunReport({**metrics, "warnings": ["nothing was <learned>", "and more"]}))
    assert page.index("<li>nothing was &lt;learned&gt;</li>\n<li>and more</li>") < page.index("Test accuracy")
    assert 'class="warnings"' not in run_page(RunReport({**metrics, "warnings": []}))


@pytest.mark.usefixtures("undrawn")
def test_held_out_accuracies_of_a_checkpoint_have_their_note(
    metrics: dict[str, Any], episodes: Sequence[EpisodeRow], epochs: Sequence[EpochRow]
) -> None:
    report = RunReport(metrics, episodes=episodes, epochs=epochs)
    note = "may have been trained on these held-out images"
    assert note not in run_page(report)
    noted = run_page(dataclasses.replace(report, metrics={**metrics, "checkpoint": "resnet20.th"}))
    assert noted.count(note) == 2  # below the search and below the fine-tuning


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("count", [1, 2])
def test_one_thing_is_not_called_several(
    count: int, metrics: dict[str, Any], episodes: Sequence[EpisodeRow]
) -> None:
    metrics["onnx"]["threads"] = count
    row = LayerRow("conv", (8, 3, 3, 3), (), 216, 108, 9000, 4500)
    page = run_page(RunReport(metrics, [row] * count, episodes[:count]))
    assert ("2 episodes" in page) == (count == 2)  # one plan is no search
    for noun in ("layer", "thread"):
        assert re.search(rf"\b{count} {noun}{'' if count == 1 else 's'}\b", page), noun


@pytest.mark.parametrize(("ratio", "text"), [(0.8, "1.25× slower"), (1.004, "unchanged")])
def test_a_change_in_time_is_called_what_it_is(metrics: dict[str, Any], ratio: float, text: str) -> None:
    metrics["ratios"]["latency"] = ratio
    document = run_page(RunReport(metrics))
    assert text in outline(document).cells
    assert f'<dd class="value">{text}</dd>' in document
    assert "23.1\N{NO-BREAK SPACE}ms → 17.6\N{NO-BREAK SPACE}ms" in document
    assert "1.00×" not in document


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.9", True, [0.9]])
def test_a_metric_that_is_no_number_is_refused(metrics: dict[str, Any], value: object) -> None:
    metrics["compressed"]["accuracy"] = value
    with pytest.raises(ReportError, match=r"compressed\.accuracy is .*finite number"):
        run_page(RunReport(metrics))


@pytest.mark.usefixtures("undrawn")
def test_names_of_layers_and_attributes_are_never_markup(metrics: dict[str, Any]) -> None:
    hostile = "\"><img src=x onerror='alert(1)'>"
    row = LayerRow(hostile, (8, 3, 3, 3), (), 216, 216, 9000, 9000, reason=hostile)
    metrics["onnx"]["busy"] = hostile  # stands in the label of the table, an attribute
    found = outline(run_page(RunReport(metrics, [row])))
    assert "onerror" not in dict(found.attributes)
    assert [cell for cell in found.cells if "onerror" in cell] == [hostile, hostile]
    assert any(name == "aria-label" and hostile in str(value) for name, value in found.attributes)


@pytest.mark.parametrize("count", [1, 2, 70])
def test_any_number_of_rows_can_be_drawn(
    count: int, metrics: Mapping[str, Any], episodes: Sequence[EpisodeRow], epochs: Sequence[EpochRow]
) -> None:
    layers = [LayerRow(f"layer{i}", (4, 4, 3, 3), (2, 3), 144, 90, 1000, 900) for i in range(count)]
    outline(run_page(RunReport(metrics, layers, episodes[:count], epochs[:count])))


@pytest.mark.usefixtures("undrawn")
def test_layers_in_integers_say_so(metrics: Mapping[str, Any], layers: Sequence[LayerRow]) -> None:
    assert "Precision" not in outline(run_page(RunReport(metrics, layers))).cells
    mixed = [dataclasses.replace(layers[0], precision="int8"), *layers[1:]]
    cells = outline(run_page(RunReport(metrics, mixed))).cells
    assert cells.count("int8") == 1
    assert cells.count("float32") == len(layers) - 1


def test_a_file_in_integers_says_how_far_it_agrees(metrics: dict[str, Any]) -> None:
    assert "Agreement with PyTorch" not in run_page(RunReport(metrics))
    metrics = {**metrics, "onnx": {**metrics["onnx"], "agreement": 0.991}}
    page = run_page(RunReport(metrics))
    assert "Largest difference from PyTorch, before rounding" in page
    assert "Agreement with PyTorch, with rounding" in page
    assert "99.10" in page


def own_score(before: float, after: float, name: str = "mean IoU") -> dict[str, Any]:
    """The numbers of a network that its user judges."""
    return {
        "score_name": name,
        "baseline": {"params": 1000, "macs": 10, "score": before, "agreement": 1.0},
        "compressed": {"params": 400, "macs": 5, "score": after, "agreement": 0.8628},
    }


def test_the_users_score_leads_under_its_name(whole_run: RunReport) -> None:
    numbers = own_score(0.983, 0.986)
    rows = before_after(numbers).rows[:2]
    assert [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in rows] == [
        ["mean IoU", "98.30 %", "98.60 %", "+0.30 points"],
        ["Agreement", "100.00 %", "86.28 %", "−13.72 points"],
    ]
    assert "for a mean IoU of 98.60\N{NO-BREAK SPACE}% instead of 98.30" in conclusion(numbers)
    page = run_page(dataclasses.replace(whole_run, metrics=numbers))
    assert f'<p class="lead">{conclusion(numbers)}</p>' in page
    assert '<dt>mean IoU</dt><dd class="value">98.60' in page
    assert "mean IoU is what plans were chosen by." in page
    assert "<dt>Best mean IoU</dt>" in page


@pytest.mark.parametrize(
    ("before", "after", "cells"),
    [(31.2, 30.7, ["31.2", "30.7", "−0.5"]), (-0.25, -0.5, ["−0.25", "−0.5", "−0.25"])],
)
def test_a_score_that_is_no_share_is_written_as_it_is(before: float, after: float, cells: list[str]) -> None:
    numbers = own_score(before, after, "PSNR")
    assert before_after(numbers).rows[0] == ["PSNR", *cells]
    assert f"PSNR of {cells[1]} instead of {cells[0]}" in conclusion(numbers)


def test_the_plan_is_drawn_layer_by_layer_with_words_to_point_at(layers: list[LayerRow]) -> None:
    first = dataclasses.replace(layers[5], name="<odd>", format="tucker", precision="int8")
    drawn = plan_drawing([*layers[:5], first, *layers[6:]], list(map(str, range(len(layers)))))
    assert drawn is not None
    assert [block.filled for block in drawn.blocks] == pytest.approx(
        [100 * row.kept for row in layers], abs=0.1
    )
    assert max(block.height for block in drawn.blocks) == 100
    assert drawn.blocks[5].title == "5"
    assert ("left dense", "soft") in drawn.legend
    page = run_page(RunReport({"model": "a"}, [first]))
    ranks = ", ".join(map(str, first.ranks))
    assert f'title="Layer: &lt;odd&gt;\nShape: 16×16×3×3\nRanks: {ranks}\nPrecision: int8\n' in page
    assert plan_drawing([], []) is None
    assert "left the network" not in drawn.caption


def test_a_removed_layer_is_an_empty_outline(layers: list[LayerRow]) -> None:
    gone = dataclasses.replace(
        layers[0], ranks=(), params_after=0, macs_after=0, reason="removed with block layer1.0"
    )
    drawn = plan_drawing([gone, gone], ["", ""])
    assert drawn is not None
    assert drawn.legend == []
    assert "an empty one left the network" in drawn.caption
    assert [block.filled for block in drawn.blocks] == [0, 0]


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_when_it_was_written(whole_run: RunReport) -> None:
    page = run_page(dataclasses.replace(whole_run, setup={"Date": "2026-11-22 14:40 UTC"}))
    assert "seed 0 · 2026-11-22 14:40 UTC" in page


def test_a_run_folder_gets_a_page_and_its_plots_of_the_same_bytes_each_time(
    run_folder: Path, layers: Sequence[LayerRow], epochs: Sequence[EpochRow]
) -> None:
    page = write_report(run_folder, layers=layers, epochs=epochs, setup={"Seed": "0"})
    assert page == run_folder / "report.html"
    assert page.read_text(encoding="utf-8").endswith("</html>\n")
    plots = sorted((run_folder / "plots").iterdir())
    assert [path.name for path in plots] == ["layers.png", "reward.png"]
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
