"""What the report says of several runtimes."""

from __future__ import annotations

from typing import Any

import pytest

from rankrl.report import ReportError, RunReport, run_page, runtimes_table
from rankrl.report.run_tables import runtime_note, runtime_rows


def entry(**values: Any) -> dict[str, Any]:
    times = {"baseline_latency_ms": 50.0, "latency_ms": 25.0, "dense_int8_latency_ms": 20.0, "score": 0.9}
    ratios = {"latency_ratio": 2.0, "latency_ratio_low": 1.9, "latency_ratio_high": 2.1}
    return {"max_abs_difference": 2e-6, "agreement": None, "clock": "processor", **times, **ratios, **values}


def noted(**runtimes: dict[str, Any]) -> str:
    return runtime_note({"runtimes": runtimes}).replace("\N{NO-BREAK SPACE}", " ")


def test_each_file_has_its_row(metrics: dict[str, Any]) -> None:
    assert runtimes_table(metrics).row_count == 0
    openvino = entry(latency_ms=12.5, baseline_latency_ms=51.0, nncf_int8_latency_ms=14.0)
    metrics["runtimes"] = {"onnxruntime": entry(), "openvino": openvino}
    columns, rows = runtime_rows(metrics)
    assert columns == ["File", "onnxruntime", "openvino", "Fastest in"]
    assert [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in rows] == [
        ["Original", "50.0 ms", "51.0 ms", "onnxruntime"],
        ["Exported file", "25.0 ms, 90.00 %", "12.5 ms, 90.00 %", "openvino"],
        ["Original in int8", "20.0 ms", "20.0 ms", "onnxruntime"],
        ["Original in NNCF int8", "–", "14.0 ms", "openvino"],
    ]
    assert runtimes_table(metrics).row_count == 4
    page = run_page(RunReport(metrics))
    assert "Runtimes" in page
    assert runtime_note(metrics) in page


def test_the_note_says_what_is_faster_where() -> None:
    ratios = {"baseline_latency_runtime_ratio": 1.01, "dense_int8_latency_runtime_ratio": 2.0}
    noisy = {
        "latency_runtime_ratio": 1.5,
        "latency_runtime_ratio_low": 0.8,
        "latency_runtime_ratio_high": 2.1,
    }
    assert noted(onnxruntime=entry(), openvino=entry(**ratios, **noisy)) == (
        "Fastest is the original in int8 in onnxruntime. openvino against onnxruntime: the original "
        "unchanged, the exported file unchanged, the original in int8 2.00× faster. onnxruntime: outputs "
        "differ from PyTorch by at most 2.0e-06. openvino: outputs differ from PyTorch by at most 2.0e-06."
    )


def test_the_note_names_classes_that_differ_clocks_and_failures() -> None:
    text = noted(
        onnxruntime=entry(max_abs_difference=None),
        openvino=entry(agreement=0.995),
        onnxruntime_cuda=entry(clock="wall", max_abs_difference=None),
        other={"failed": "other cannot load model.onnx."},
    )
    assert text == (
        "Fastest is the original in int8 in onnxruntime. openvino: outputs differ from PyTorch by at most "
        "2.0e-06. openvino: the exported file gives the class of PyTorch on 99.50 % of the held-out images. "
        "onnxruntime_cuda: timed on the wall, the others in processor time. "
        "other: not timed, since other cannot load model.onnx."
    )


def test_a_runtime_that_failed_has_a_column_without_numbers() -> None:
    columns, rows = runtime_rows({"runtimes": {"onnxruntime": entry(), "other": {"failed": "it did"}}})
    assert columns[2] == "other"
    assert [row[2] for row in rows] == ["–"] * 3


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ReportError, match=r"openvino\.latency_ms is 'fast'"):
        runtime_rows({"runtimes": {"openvino": entry(latency_ms="fast")}})
