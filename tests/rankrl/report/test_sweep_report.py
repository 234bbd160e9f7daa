"""One page for many runs: all of them listed, the front right, nothing from outside."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import rankrl
from decomposition import list_formats
from rankrl.report import ReportError, results_table, write_sweep_report
from rankrl.report.figures import method_styles
from rankrl.report.run_folder import gather_runs
from rankrl.report.sweep_page import COSTS, LATENCY, cost_points, pareto_front, with_fronts

METHODS = ("tensor_ring", "tucker", "cp")
BUDGETS = (0.5, 0.25)


def metrics(method: str, budget: float, seed: int = 0) -> dict[str, Any]:
    """Plausible numbers that were made up."""
    accuracy = 0.9 + 0.02 * budget - 0.005 * METHODS.index(method)
    params, macs = round(269_722 * budget), round(40_551_040 * budget**0.5)
    return {
        "task": "pipeline",
        "model": "resnet20",
        "dataset": "cifar10",
        "decomposition": method,
        "selector": "ddpg",
        "seed": seed,
        "baseline": {"accuracy": 0.9173, "params": 269_722, "macs": 40_551_040},
        "compressed": {"accuracy": accuracy - 0.1, "params": params, "macs": macs},
        "finetuned": {"accuracy": accuracy},
        "ratios": {"params": 269_722 / params, "macs": 40_551_040 / macs, "latency": 1.5 - budget},
        "onnx": {"latency_ms": 23.0 / (1.5 - budget), "baseline_latency_ms": 23.0},
    }


def make_run(folder: Path, content: dict[str, Any] | None, config: dict[str, Any] | None = None) -> None:
    (folder / "state").mkdir(parents=True)
    record = {"config": config or {"task": "pipeline"}, "overrides": []}
    (folder / "state" / "configuration.json").write_text(json.dumps(record))
    if content is not None:
        (folder / "metrics.json").write_text(json.dumps(content))
        (folder / "report.html").write_text("<!doctype html>")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "sweep"
    for method in METHODS:
        for budget in BUDGETS:
            config = {"task": "pipeline", "budget": {"params": budget, "macs": None}}
            make_run(
                folder / f"budget.params-{budget}+decomposition-{method}", metrics(method, budget), config
            )
    make_run(folder / "unfinished", None)
    make_run(folder / "failed", None)
    (folder / "failed" / "error.json").write_text(json.dumps({"error": "budget <0.001> cannot be reached"}))
    make_run(folder / "page", None, {"task": "report"})
    return folder


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_run_is_gathered_with_its_state(sweep: Path) -> None:
    states = {str(run.folder): run.status for run in gather_runs(sweep)}
    assert states.pop("failed") == "failed"
    assert states.pop("unfinished") == "unfinished"
    assert len(states) == 6
    assert set(states.values()) == {"finished"}


def test_the_terminal_breaks_names_of_jobs_between_their_options(sweep: Path) -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(results_table(sweep))
    lines = [re.split("[│ ]+", line)[1] for line in capture.get().splitlines() if line.startswith("│")]
    assert set(lines) >= {"budget.params-0.25+", "decomposition-tensor_ring", "decomposition-cp"}


def test_a_run_measured_on_a_busy_machine_is_as_fast_as_on_a_quiet_one(tmp_path: Path) -> None:
    for name, slow in (("quiet", 1.0), ("busy", 4.0)):
        content = metrics("cp", 0.5)
        content["onnx"] = {key: slow * value for key, value in content["onnx"].items()}
        make_run(tmp_path / name, content)
    runs = gather_runs(tmp_path)
    points = cost_points(runs, LATENCY)
    assert [value for _, (value, _) in points.runs] == pytest.approx([1.0, 1.0])
    assert [value for value, _ in points.dense.values()] == [1.0]


def test_the_share_of_a_latency_is_that_of_the_turns(tmp_path: Path) -> None:
    make_run(tmp_path / "run", metrics("cp", 0.25))
    ((_, (value, _)),) = cost_points(gather_runs(tmp_path), LATENCY).runs
    assert value == pytest.approx(1 / 1.25)


@pytest.mark.usefixtures("undrawn")
def test_times_within_the_noise_are_called_unchanged(sweep: Path, tmp_path: Path) -> None:
    page = write_sweep_report(sweep).read_text()
    assert page.count(">unchanged</td>") == 3  # the budgets of 0.5
    assert page.count(">1.25×</td>") == 3
    assert ">1.00×</td>" not in page
    assert '<dd class="value">unchanged</dd>' in page  # the fastest that loses at most a point
    for name, low, text in (("clear", 1.2, "1.25× faster"), ("noisy", 0.9, "unchanged")):
        content = metrics("cp", 0.25)
        content["finetuned"]["accuracy"] = 0.91
        content["onnx"] |= {"latency_ratio_low": low, "latency_ratio_high": 1.4}
        make_run(tmp_path / name / "run", content)
        assert f'<dd class="value">{text}</dd>' in write_sweep_report(tmp_path / name).read_text()


@pytest.mark.usefixtures("undrawn")
def test_csv_holds_plain_numbers(sweep: Path) -> None:
    write_sweep_report(sweep)
    found = {row["folder"]: row for row in rows(sweep)}
    row = found["budget.params-0.5+decomposition-cp"]
    assert row["method"] == "cp"
    assert row["budget"] == "params 0.5"
    assert float(row["accuracy"]) == metrics("cp", 0.5)["finetuned"]["accuracy"]
    assert int(row["params"]) == 134861
    assert float(row["latency_ratio"]) == 1.0
    assert float(row["baseline_accuracy"]) == 0.9173
    assert found["failed"]["error"] == "budget <0.001> cannot be reached"


def test_page_shows_front_table_and_failures(sweep: Path) -> None:
    page = write_sweep_report(sweep).read_text()
    assert re.findall(r"<h2[^>]*>([^<]*)", page) == [
        "Accuracy and cost",
        "Runs",
        "Failed and unfinished",
        "The same in all runs",
    ]
    assert "budget &lt;0.001&gt; cannot be reached" in page
    links = re.findall(r'href="([^"#][^"]*)"', page)
    assert len(links) == 6
    assert all(re.fullmatch(r"[\w.%-]+/report\.html", link) for link in links)
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 1
    for name in ("tensor ring", "tucker", "cp", "dense", "Pareto front"):
        assert name in drawings[0]


@pytest.mark.usefixtures("undrawn")
def test_the_most_accurate_runs_come_first(sweep: Path) -> None:
    page = write_sweep_report(sweep).read_text()
    body = page.partition('<table class="runs">')[2].partition("</table>")[0]
    rows = [re.findall(r"(\d+\.\d+)\xa0%", row) for row in body.split("<tr>")[2:]]
    accuracies = [float(row[0]) for row in rows]
    assert len(accuracies) == 6
    assert accuracies == sorted(accuracies, reverse=True)
    assert "Seed" not in body  # the same in all runs


@pytest.mark.usefixtures("undrawn")
def test_what_differs_gets_a_column(sweep: Path) -> None:
    make_run(sweep / "other", {**metrics("cp", 0.5, seed=1), "model": "<b>resnet56</b>"})
    page = write_sweep_report(sweep).read_text()
    header = page.partition('<table class="runs">')[2].partition("</thead>")[0]
    assert ">Seed<" in header
    assert ">Model<" in header
    assert "<b>resnet56" not in page


def swept(folder: Path, **options: Any) -> None:
    """Add a run of a sweep over options of the command line, `optim__lr=0.1`."""
    overrides = {name.replace("__", "."): value for name, value in options.items()}
    config: dict[str, Any] = {"task": "pipeline", "optim": {"name": "sgd", "lr": 0.5}}
    for name, value in overrides.items():
        group, _, key = name.partition(".")
        config[group] = {**config.get(group, {}), key: value} if key else value
    content = metrics("cp", options.get("budget__params", 0.5), options.get("seed", 0))
    content["finetuned"]["accuracy"] += 0.01 * options.get("seed", 0)
    name = "+".join(f"{name}-{value}" for name, value in overrides.items())
    make_run(folder / name, content, config)
    record = {"config": config, "overrides": [f"{name}={value}" for name, value in overrides.items()]}
    (folder / name / "state" / "configuration.json").write_text(json.dumps(record))


@pytest.mark.usefixtures("undrawn")
def test_every_option_in_which_runs_differ_is_a_column(tmp_path: Path) -> None:
    for rate in (0.001, 0.01):
        for images in (64, 256):
            swept(tmp_path, optim__lr=rate, calibration__images=images, budget__params=0.25, train__epochs=3)
    swept(tmp_path, budget__params=0.5, calibration__images=64)  # the sweep before it grew by a rate
    page = write_sweep_report(tmp_path).read_text()
    found = {
        (float(row["optim.lr"]), int(row["calibration.images"]), float(row["budget.params"]))
        for row in rows(tmp_path)
    }
    grown = {(rate, images, 0.25) for rate in (0.001, 0.01) for images in (64, 256)}
    assert found == grown | {(0.5, 64, 0.5)}
    header = page.partition('<table class="runs">')[2].partition("</thead>")[0]
    assert "optim.<wbr>lr" in header  # so that long names break in a narrow window
    header = header.replace("<wbr>", "")
    for name in ("optim.lr", "calibration.images", "Budget"):
        assert f">{name}<" in header
    for name in ("budget.params", "seed"):  # which have a column, or are all the same
        assert f">{name}<" not in header
    loaded = rankrl.load_runs(tmp_path)
    assert {(row["optim.lr"], row["calibration.images"], row["budget.params"]) for row in loaded} == found
    assert "Means over seeds" not in page


@pytest.mark.usefixtures("undrawn")
def test_seeds_are_averaged(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        swept(tmp_path, optim__lr=0.1, seed=seed)
    swept(tmp_path, optim__lr=0.2, seed=0)
    page = write_sweep_report(tmp_path).read_text()
    first = metrics("cp", 0.5)["finetuned"]["accuracy"]
    several, alone = sorted(rankrl.load_runs(tmp_path, average_seeds=True), key=lambda row: row["optim.lr"])
    assert (several["runs"], alone["runs"]) == (3, 1)
    assert several["accuracy"] == pytest.approx(first + 0.01)
    # Student's t for two degrees of freedom, 4.303, times the standard error.
    assert several["accuracy_interval"] == pytest.approx(4.303 * 0.01 / 3**0.5, rel=1e-3)
    assert (alone["accuracy"], alone["accuracy_interval"]) == (pytest.approx(first), None)
    assert "seed" not in several
    assert "Means over seeds" in page
    assert re.search(r"91\.00\xa0% ±\xa02\.48\xa0%", page)


@pytest.mark.usefixtures("undrawn")
def test_runs_from_python_are_told_apart_by_their_calls(tmp_path: Path) -> None:
    for candidates, iou in ((4, 0.81), (8, 0.83)):
        numbers = {"params": 500, "macs": 5, "score": iou, "agreement": 0.9}
        content = {
            "task": "compress",
            "model": "Net",
            "budget": {"params": 0.5},
            "score_name": "mean IoU",
            "baseline": {"params": 1000, "macs": 10, "score": 0.85, "agreement": 1.0},
            "compressed": numbers,
        }
        record = {"task": "rankrl.compress", "params": 0.5, "candidates": {"candidates": candidates}}
        make_run(tmp_path / str(candidates), content, record)
    page = write_sweep_report(tmp_path).read_text()
    loaded = rankrl.load_runs(tmp_path)
    assert [(row["candidates.candidates"], row["score"]) for row in loaded] == [(4, 0.81), (8, 0.83)]
    assert [row["params"] for row in loaded] == [500, 500]
    assert ">mean IoU<" in page
    assert ">83.00\xa0%<" in page
    assert "<dt>Highest mean IoU</dt>" in page


def test_damaged_metrics_count_as_failed(sweep: Path) -> None:
    path = sweep / "budget.params-0.5+decomposition-cp" / "metrics.json"
    path.write_text("{")
    run = next(run for run in gather_runs(sweep) if run.folder.name == path.parent.name)
    assert run.status == "failed"
    assert "metrics.json" in run.error
    write_sweep_report(sweep)


def test_runs_that_compress_nothing_have_no_front(tmp_path: Path) -> None:
    make_run(tmp_path / "train", {"task": "train", "model": "lenet5", "baseline": {"accuracy": 0.99}})
    page = write_sweep_report(tmp_path).read_text()
    assert "<svg" not in page
    assert "lenet5" in page


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "no folder"),
        (lambda folder: folder.mkdir(), "no run below"),
        (lambda folder: make_run(folder, metrics("cp", 0.5)), "is one run"),
        (lambda folder: make_run(folder / "a", None, {"task": "inspect"}), "no run below"),
    ],
)
def test_folders_without_runs_are_refused(prepare: Any, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    prepare(folder)
    with pytest.raises(ReportError, match=message):
        write_sweep_report(folder)


POINTS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=30)


@given(POINTS)
def test_front_is_what_no_point_beats(points: list[tuple[int, int]]) -> None:
    def beaten(point: tuple[float, float]) -> bool:
        return any(other != point and other[0] <= point[0] and other[1] >= point[1] for other in points)

    assert pareto_front(points) == sorted({point for point in points if not beaten(point)})


def test_formats_keep_their_colours_whatever_else_is_shown() -> None:
    together = method_styles(["magnitude", *list_formats()])
    assert {name: method_styles([name])[name] for name in list_formats()} == {
        name: together[name] for name in list_formats()
    }
    assert len(set(together.values())) == len(list_formats()) + 1


def test_dense_integers_are_a_rival_in_time_and_bytes(tmp_path: Path) -> None:
    for method, size in (("tucker", 500_000), ("cp", 200_000)):
        content = metrics(method, 0.25)
        content["dense_int8"] = {"accuracy": 0.9167, "latency_ratio": 2.0, "file_bytes": 300_000}
        content["onnx"] |= {"baseline_file_bytes": 1_000_000, "file_bytes": size}
        make_run(tmp_path / method, content)
    runs = with_fronts(gather_runs(tmp_path))
    rivals = {cost: list(cost_points(runs, cost).integers.values()) for cost in COSTS}
    assert rivals == {"params": [], "macs": [], LATENCY: [(0.5, 0.9167)], "file_bytes": [(300_000, 0.9167)]}
    # The integers are more accurate and as fast, and smaller than one of the two files.
    best = {run.method: run.best_in for run in runs}
    assert best == {"tucker": ("parameters", "MACs"), "cp": ("bytes",)}
    page = write_sweep_report(tmp_path).read_text()
    assert "dense, 8-bit integers" in page
    assert "bytes of the file" in page
    assert "parameters, MACs" in page
    assert {row["best_in"] for row in rows(tmp_path)} == {", ".join(each) for each in best.values()}


def test_a_run_that_another_beats_in_everything_is_best_in_nothing(sweep: Path) -> None:
    best = {(run.method, run.budget): run.best_in for run in with_fronts(gather_runs(sweep))}
    assert best.pop(("tensor_ring", "params 0.5")) == ("parameters", "MACs")
    assert best.pop(("tensor_ring", "params 0.25")) == ("parameters", "MACs", "latency")
    assert set(best.values()) == {()}


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_when_it_was_written(sweep: Path) -> None:
    page = write_sweep_report(sweep).read_text()
    assert re.search(r'<p class="eyebrow">.*\d{4}-\d\d-\d\d \d\d:\d\d [^<]+</p>', page)
