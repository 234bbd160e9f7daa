"""How the numbers of a run are read and written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rankrl.report import collect_setup, summary_table
from rankrl.report.stages import format_accuracy, format_large, format_points, format_ratio, stages


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_a_run_without_fine_tuning_ends_with_the_compressed_model(metrics: dict[str, Any]) -> None:
    del metrics["finetuned"]
    found = stages(metrics)
    assert [stage.name for stage in found] == ["Baseline", "Compressed"]
    assert [stage.latency_ms for stage in found] == [23.08, 17.62]


def test_fine_tuning_changes_neither_parameters_nor_macs(metrics: dict[str, Any]) -> None:
    _, compressed, finetuned = stages(metrics)
    assert (finetuned.params, finetuned.macs) == (compressed.params, compressed.macs)
    assert compressed.latency_ms is None


def test_no_metrics_give_no_stages() -> None:
    assert stages({}) == []
    assert summary_table({}).row_count == 0


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
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(summary_table(metrics))
    text = plain(capture.get())
    assert "resnet20 on cifar10" in text
    for number in (
        "91.73 %",
        "74.12 %",
        "90.56 %",
        "−1.17 points",
        "269,722",
        "107,689",
        "2.50× fewer",
        "1.31× faster",
    ):
        assert number in text


def test_a_partial_run_prints_what_it_has() -> None:
    table = summary_table({"model": "lenet5", "baseline": {"accuracy": 0.99, "params": 431_080}})
    assert [column.header for column in table.columns] == ["", "Baseline"]
    assert table.row_count == 2


def test_the_setup_names_command_seed_versions_and_hardware() -> None:
    setup = collect_setup(["rankrl", "model=resnet20", "note=two words"], 7)
    assert setup["Command"] == "rankrl model=resnet20 'note=two words'"
    assert setup["Seed"] == "7"
    assert "torch" in setup["Versions"]
    assert " core" in setup["Processor"]
