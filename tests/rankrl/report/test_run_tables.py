"""How the numbers of a run are read and written."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rankrl.report import RunReport, collect_setup, conclusion, run_page
from rankrl.report.run_tables import (
    before_after,
    certificate_note,
    costs,
    format_accuracy,
    format_large,
    format_points,
    format_ratio,
    format_share,
    latency_note,
    measured_table,
    runtimes_table,
    stages,
    summary_table,
)
from rankrl.verify.agreement import OWN_SCORE, Basis, certify, uncertified


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_a_run_without_fine_tuning_ends_with_the_compressed_model(metrics: dict[str, Any]) -> None:
    del metrics["finetuned"]
    found = stages(metrics)
    assert [stage.name for stage in found] == ["Baseline", "Compressed"]
    assert [stage.numbers["latency_ms"] for stage in found] == [23.08, 17.62]


def test_without_an_epoch_the_fine_tuned_network_is_the_compressed_one(metrics: dict[str, Any]) -> None:
    metrics["finetuned"] = {"accuracy": metrics["compressed"]["accuracy"]}
    assert [stage.name for stage in stages({**metrics, "epochs": [{"epoch": 1}]})][2:] == ["Fine-tuned"]
    found = stages(metrics)
    assert [stage.name for stage in found] == ["Baseline", "Compressed"]
    assert [stage.numbers["latency_ms"] for stage in found] == [23.08, 17.62]


def test_fine_tuning_changes_neither_parameters_nor_macs(metrics: dict[str, Any]) -> None:
    _, compressed, finetuned = stages(metrics)
    assert (finetuned.numbers["params"], finetuned.numbers["macs"]) == (
        compressed.numbers["params"],
        compressed.numbers["macs"],
    )
    assert "latency_ms" not in compressed.numbers


def test_no_metrics_give_no_stages() -> None:
    assert stages({}) == []
    assert len(summary_table({}).rows) == 0


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.000 k"),
        (40_551_040, "40.55 M"),
        (999_999, "1000 k"),
        (1.8e9, "1.800 G"),
    ],
)
def test_large_counts_keep_four_digits(count: float, text: str) -> None:
    assert plain(format_large(count)) == text


@given(st.floats(0, 1), st.floats(0, 1))
def test_points_have_the_sign_of_the_change(before: float, after: float) -> None:
    text = format_points(before, after)
    if after - before > 1e-4:
        assert text.startswith("+")
    if before - after > 1e-4:
        assert text.startswith("−")


@given(st.floats(0.01, 100))
def test_ratios_never_read_below_one(ratio: float) -> None:
    text = format_ratio(ratio, "fewer", "more")
    assert float(text.split("×")[0]) >= 1
    assert text.endswith("fewer" if ratio >= 1 else "more")


def test_what_was_not_measured_is_a_dash() -> None:
    assert format_accuracy(None) == format_large(None) == format_points(None, 0.5) == "–"
    assert format_ratio(None, "fewer", "more") == "–"


def test_the_terminal_table_holds_every_number(metrics: dict[str, Any]) -> None:
    text = printed(metrics)
    assert "resnet20 on cifar10" in text
    for number in ("91.73 %", "74.12 %", "90.56 %", "−1.17 points", "269,722", "107,689"):
        assert number in text
    assert "2.50× fewer" in text
    assert "1.31× faster" in text


def test_the_table_shows_sizes_and_the_dense_network_in_integers(metrics: dict[str, Any]) -> None:
    metrics["onnx"] |= {"file_bytes": 500_000, "baseline_file_bytes": 1_000_000, "baseline_latency_ms": 24.0}
    metrics["dense_int8"] = {"accuracy": 0.9, "latency_ratio": 2.0, "file_bytes": 250_000}
    table = before_after(metrics)
    columns, rows = table.columns, table.rows
    assert columns[-2:] == ["Change", "Dense, int8"]
    cells = {row[0]: row for row in rows}
    assert all(len(row) == len(columns) for row in rows)
    assert cells["File"][-2] == "2.00× smaller"
    assert plain(cells["Test accuracy"][-1]) == "90.00 %"
    assert plain(cells["Latency"][-1]).startswith("12")
    assert cells["Parameters"][-1] == cells["Parameters"][1]
    console = Console(width=80)
    with console.capture() as capture:
        console.print(summary_table(metrics))
    assert not [cell for row in rows for cell in row if plain(cell) not in plain(capture.get())]
    assert "Dense," in capture.get()
    del metrics["dense_int8"]
    assert before_after(metrics).columns[-1] == "Change"


def printed(metrics: dict[str, Any]) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(summary_table(metrics))
    return plain(" ".join(capture.get().split()))


def speed(metrics: dict[str, Any]) -> str:
    return next(cost.change for cost in costs(metrics) if cost.title == "Latency")


def test_a_change_within_the_noise_is_called_unchanged(metrics: dict[str, Any]) -> None:
    for before, after, faster in ((24.5, 24.4, 0.997), (7.27, 7.26, 7.27 / 7.26)):
        metrics["onnx"] |= {"baseline_latency_ms": before, "latency_ms": after}
        metrics["ratios"]["latency"] = faster
        assert speed(metrics) == "unchanged"
        text = printed(metrics)
        assert f"{before:#.3g} ms" in text
        assert "unchanged" in text
        assert not {"faster", "slower"} & set(text.split())


@pytest.mark.parametrize(
    ("ratio", "low", "high", "text"),
    [
        (1.31, 1.2, 1.4, "1.31× faster"),
        (1.31, 0.99, 1.4, "unchanged"),
        (0.8, 0.7, 0.9, "1.25× slower"),
        (0.8, 0.7, 1.1, "unchanged"),
    ],
)
def test_a_change_counts_if_its_interval_does_not_cover_1(
    metrics: dict[str, Any], ratio: float, low: float, high: float, text: str
) -> None:
    metrics["ratios"]["latency"] = ratio
    metrics["onnx"] |= {"latency_ratio_low": low, "latency_ratio_high": high}
    assert speed(metrics) == text
    assert text in printed(metrics)


def test_the_terminal_shows_the_spread_and_a_busy_machine(metrics: dict[str, Any]) -> None:
    assert "interval" not in printed(metrics)
    metrics["onnx"] |= {
        "latency_ratio_low": 1.284,
        "latency_ratio_high": 1.333,
        "clock": "processor",
        "busy": "the timed passes waited 52 % of the time for a core",
    }
    assert plain(latency_note(metrics)) == (
        "Latency is the 10th percentile of the processor time per batch of 64 on 1 thread. The original "
        "takes 1.28 to 1.33 times as long (95 % interval of the ratio of their times). The machine was "
        "busy: the timed passes waited 52 % of the time for a core."
    )
    for part in ("1.28 to 1.33", "The machine was busy"):
        assert part in printed(metrics)


@pytest.mark.parametrize(
    ("ratio", "low", "high", "text"),
    [(2.42, 2.3, 2.5, "2.42× faster"), (1.2, 0.9, 1.4, "unchanged"), (0.5, 0.45, 0.55, "2.00× slower")],
)
def test_the_dense_network_in_integers_is_named_as_the_first_rival(
    metrics: dict[str, Any], ratio: float, low: float, high: float, text: str
) -> None:
    assert "8-bit" not in latency_note(metrics)
    metrics["dense_int8"] = {
        "accuracy": 0.9167,
        "latency_ratio": ratio,
        "latency_ratio_low": low,
        "latency_ratio_high": high,
        "file_bytes": 315_514,
    }
    rival = f"For comparison, the dense network in 8-bit integers: 91.67 %, {text}."
    assert rival in plain(latency_note(metrics))


def test_an_exported_file_alone_has_its_own_latency(metrics: dict[str, Any]) -> None:
    metrics["onnx"] |= {"baseline_latency_ms": 48.5, "latency_ms": 28.9}
    alone = {key: metrics[key] for key in ("model", "compressed", "onnx")}
    (compressed,) = stages(alone)
    assert (compressed.name, compressed.numbers["latency_ms"]) == ("Compressed", 28.9)
    assert "28.9" in printed(alone)
    assert "48.5" not in printed(alone)
    assert [stage.numbers["latency_ms"] for stage in stages({**alone, "baseline": metrics["baseline"]})] == [
        48.5,
        28.9,
    ]


def test_a_partial_run_prints_what_it_has() -> None:
    table = summary_table({"model": "lenet5", "baseline": {"accuracy": 0.99, "params": 431_080}})
    assert table.columns == ["", "Baseline"]
    assert len(table.rows) == 2


def test_the_setup_names_command_seed_versions_and_hardware() -> None:
    setup = collect_setup(["rankrl", "model=resnet20", "note=two words"], 7)
    assert setup["Command"] == "rankrl model=resnet20 'note=two words'"
    assert setup["Seed"] == "7"
    assert "torch" in setup["Versions"]
    assert re.search(r", \d+ cores?$", setup["Processor"])


def test_a_run_ends_with_one_sentence(metrics: dict[str, Any]) -> None:
    metrics["onnx"]["baseline_file_bytes"] = 1_090_000
    assert conclusion(metrics).replace("\N{NO-BREAK SPACE}", " ") == (
        "The compressed network needs 39.9 % of the parameters, 48.0 % of the MACs, 76.3 % of the time and "
        "41.4 % of the bytes for a test accuracy of 90.56 % instead of 91.73 %."
    )
    assert conclusion({"baseline": {"accuracy": 0.9, "params": 10}}) == ""
    halved = {"baseline": {"params": 10}, "compressed": {"params": 5}}
    said = conclusion(halved).replace("\N{NO-BREAK SPACE}", " ")
    assert said == "The compressed network needs 50.0 % of the parameters."


def test_a_share_of_next_to_nothing_has_no_sign() -> None:
    assert format_share(-0.0003) == format_share(0.0) == "0.0\N{NO-BREAK SPACE}%"
    assert format_share(-0.02) == "-2.0\N{NO-BREAK SPACE}%"


def metrics(taken: str) -> dict[str, Any]:
    plans = [("all int8", 0.01, 0.4), ("all dense", 0.0, 1.0)]
    return {
        "search": {
            "measured": [
                {
                    "name": name,
                    "loss": loss,
                    "cost": cost,
                    "measure": "latency",
                    "expected_cost": cost + 0.01,
                    "expected_loss": loss,
                    "predicted_loss": 0.008 if name == "all int8" else None,
                    "taken": name == taken,
                }
                for name, loss, cost in plans
            ]
        }
    }


def test_every_plan_has_a_row_and_the_one_that_was_taken_is_marked() -> None:
    table = measured_table(metrics("all int8"))
    assert table.rows == [
        ["all int8 (taken)", "0.0100", "0.400", "0.410"],
        ["all dense", "0.0000", "1.000", "1.010"],
    ]
    assert len(table.columns) == len(table.rows[0])
    assert "the cost is the time." in table.caption
    assert "All int8 was taken" in table.caption


def test_a_plan_whose_expected_cost_was_compared_is_marked() -> None:
    unsure = metrics("all int8")
    unsure["search"]["measured"][0] |= {"cost": 0.41, "unsure_cost": 0.52}
    table = measured_table(unsure)
    assert table.rows[0] == ["all int8 (taken)", "0.0100", "0.520 (unsure)", "0.410"]
    assert "the expected cost was compared" in table.caption


def test_the_network_as_it_was_is_said_to_be_that() -> None:
    assert "you get the original network" in measured_table(metrics("all dense")).caption
    assert not measured_table({})


def entry(**values: Any) -> dict[str, Any]:
    times = {"baseline_latency_ms": 50.0, "latency_ms": 25.0, "dense_int8_latency_ms": 20.0, "score": 0.9}
    ratios = {"latency_ratio": 2.0, "latency_ratio_low": 1.9, "latency_ratio_high": 2.1}
    return {"max_abs_difference": 2e-6, "agreement": None, "clock": "processor", **times, **ratios, **values}


def noted(**runtimes: dict[str, Any]) -> str:
    caption = runtimes_table({"runtimes": runtimes}).caption
    return caption.removeprefix("All were timed in the same turns. ").replace("\N{NO-BREAK SPACE}", " ")


def test_each_file_has_its_row(metrics: dict[str, Any]) -> None:
    assert len(runtimes_table(metrics).rows) == 0
    openvino = entry(latency_ms=12.5, baseline_latency_ms=51.0, nncf_int8_latency_ms=14.0)
    metrics["runtimes"] = {"onnxruntime": entry(), "openvino": openvino}
    table = runtimes_table(metrics)
    assert table.columns == ["File", "onnxruntime", "openvino", "Fastest in"]
    assert [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in table.rows] == [
        ["Original", "50.0 ms", "51.0 ms", "onnxruntime"],
        ["Exported file", "25.0 ms, 90.00 %", "12.5 ms, 90.00 %", "openvino"],
        ["Original in int8", "20.0 ms", "20.0 ms", "onnxruntime"],
        ["Original in NNCF int8", "–", "14.0 ms", "openvino"],
    ]
    assert len(runtimes_table(metrics).rows) == 4
    page = run_page(RunReport(metrics))
    assert "Runtimes" in page
    assert table.caption in page


def test_the_note_compares_runtimes() -> None:
    ratios = {"baseline_latency_runtime_ratio": 1.01, "dense_int8_latency_runtime_ratio": 2.0}
    noisy = {
        "latency_runtime_ratio": 1.5,
        "latency_runtime_ratio_low": 0.8,
        "latency_runtime_ratio_high": 2.1,
    }
    assert noted(onnxruntime=entry(), openvino=entry(**ratios, **noisy)) == (
        "onnxruntime: outputs differ from PyTorch by at most 2.0e-06. openvino: against onnxruntime, the "
        "original unchanged, the exported file unchanged, the original in int8 2.00× faster. "
        "openvino: outputs differ from PyTorch by at most 2.0e-06."
    )


def test_the_note_names_classes_that_differ_clocks_and_failures() -> None:
    text = noted(
        onnxruntime=entry(max_abs_difference=None),
        openvino=entry(agreement=0.995),
        onnxruntime_cuda=entry(clock="wall", max_abs_difference=None),
        other={"failed": "other cannot load model.onnx."},
    )
    assert text == (
        "onnxruntime_cuda: timed on the wall, the others in processor time. openvino: outputs differ from "
        "PyTorch by at most 2.0e-06. openvino: the exported file gives the class of PyTorch on 99.50 % of "
        "the held-out images. other: not timed, since other cannot load model.onnx."
    )


def test_a_runtime_that_failed_has_a_column_without_numbers() -> None:
    table = runtimes_table({"runtimes": {"onnxruntime": entry(), "other": {"failed": "it did"}}})
    assert table.columns[2] == "other"
    assert [row[2] for row in table.rows] == ["–"] * 3


ON_IMAGES = Basis("accuracy", "test images")


def certified_metrics(lost: int, inputs: int, drop: float | None, basis: Basis = ON_IMAGES) -> dict[str, Any]:
    found = certify(np.ones(inputs), np.arange(inputs) >= lost, drop, basis)
    assert found is not None
    return {"certificate": found.to_dict()}


@pytest.mark.parametrize(
    ("lost", "inputs", "drop", "expected"),
    [
        (10, 10_000, 0.005, "0.18): a loss of at most 0.50 points is certified."),
        (1, 500, 0.005, "at most 0.50 points is not certified, which would take about 2,"),
        (10, 1000, 0.005, "): more than the 0.50 points that may be lost."),
        (5, 1000, 0.005, "): no number of inputs certifies at most 0.50 points at this loss."),
        (
            3,
            1000,
            None,
            "On 1,000 test images it loses 0.30 points of accuracy (95\N{NO-BREAK SPACE}% interval of the "
            "loss: 0.06 to",
        ),
    ],
)
def test_what_is_certified(lost: int, inputs: int, drop: float | None, expected: str) -> None:
    assert expected in certificate_note(certified_metrics(lost, inputs, drop))


def test_a_score_that_chose_the_plan_certifies_nothing() -> None:
    found = certified_metrics(0, 10_000, 0.01, OWN_SCORE)
    assert not found["certificate"]["certified"]
    assert (
        ", by which the plan may have been chosen, too: at most 0.01 is not certified."
        in certificate_note(found)
    )
    assert certificate_note({"uncertified": uncertified(OWN_SCORE)}).startswith(
        "Nothing certifies its loss: your score"
    )
    assert certificate_note({}) == ""


def test_a_gain_is_told_as_one() -> None:
    before = np.arange(1000) >= 8
    found = certify(before, np.ones(1000), 0.01, ON_IMAGES)
    assert found is not None
    numbers = {"certificate": found.to_dict()}
    assert (
        "it gains 0.80 points of accuracy (95\N{NO-BREAK SPACE}% interval of the loss: −1."
        in certificate_note(numbers)
    )
    assert set(numbers["certificate"]) >= {
        "loss",
        "low",
        "high",
        "inputs",
        "drop",
        "certified",
        "needed",
        "unit",
    }
    assert "basis" not in numbers["certificate"]
