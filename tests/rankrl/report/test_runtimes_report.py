"""What the report says of several runtimes."""

from __future__ import annotations

from typing import Any

import pytest

from rankrl.report import ReportError, RunReport, run_page, runtimes_table
from rankrl.report.runtimes import runtime_note, runtime_rows


def entry(**values: Any) -> dict[str, Any]:
    times = {"baseline_latency_ms": 50.0, "latency_ms": 25.0, "dense_int8_latency_ms": 20.0}
    ratios = {"latency_ratio": 2.0, "latency_ratio_low": 1.9, "latency_ratio_high": 2.1}
    return {"max_abs_difference": 2e-6, "agreement": None, "clock": "processor", **times, **ratios, **values}


def noted(**runtimes: dict[str, Any]) -> str:
    return runtime_note({"runtimes": runtimes}).replace("\N{NO-BREAK SPACE}", " ")


def test_each_runtime_has_its_row(metrics: dict[str, Any]) -> None:
    assert runtimes_table(metrics).row_count == 0
    metrics["runtimes"] = {"onnxruntime": entry(), "openvino": entry(latency_ms=12.5)}
    columns, rows = runtime_rows(metrics)
    assert [row[0] for row in rows] == ["onnxruntime", "openvino"]
    assert all(len(row) == len(columns) for row in rows)
    assert [row[2:4] for row in rows] == [
        ["25.0\N{NO-BREAK SPACE}ms", "2.00× faster"],
        ["12.5\N{NO-BREAK SPACE}ms", "2.00× faster"],
    ]
    assert runtimes_table(metrics).row_count == 2
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
        "openvino against onnxruntime: the dense network unchanged, the exported file unchanged, the dense "
        "network in 8-bit integers 2.00× faster."
    )


def test_the_note_names_classes_that_differ_clocks_and_failures() -> None:
    text = noted(
        onnxruntime=entry(dense_int8_agreement=1.0),
        openvino=entry(dense_int8_agreement=0.998, agreement=0.995),
        onnxruntime_cuda=entry(clock="wall"),
        other={"failed": "other cannot load model.onnx."},
    )
    assert text == (
        "openvino: the exported file gives the class of PyTorch on 99.50 % of the held-out images. "
        "openvino: the dense network in 8-bit integers gives the class of onnxruntime on 99.80 % of the "
        "held-out images. onnxruntime_cuda: timed on the wall, the others in processor time. "
        "other: not timed, since other cannot load model.onnx."
    )


def test_a_runtime_that_failed_has_a_row_without_numbers() -> None:
    _, rows = runtime_rows({"runtimes": {"onnxruntime": entry(), "other": {"failed": "it did"}}})
    assert rows[1] == ["other", *["–"] * 5]


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ReportError, match=r"openvino\.latency_ms is 'fast'"):
        runtime_rows({"runtimes": {"openvino": entry(latency_ms="fast")}})
