"""The table of plans that were carried out."""

from __future__ import annotations

from typing import Any

from rankrl.report import measured_table
from rankrl.report.run_tables import measured_note, measured_rows


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
    columns, rows = measured_rows(metrics("all int8"))
    assert rows == [
        ["all int8 (taken)", "0.0100", "0.400", "0.410"],
        ["all dense", "0.0000", "1.000", "1.010"],
    ]
    assert len(columns) == len(rows[0])
    note = measured_note(metrics("all int8"))
    assert "the cost is the time." in note
    assert "All int8 was taken" in note
    assert measured_table(metrics("all int8")).row_count == 2


def test_the_network_as_it_was_is_said_to_be_that() -> None:
    assert "you get the original network" in measured_note(metrics("all dense"))


def test_a_run_that_measured_no_plan_has_no_table() -> None:
    assert measured_rows({})[1] == []
    assert measured_note({}) == ""
