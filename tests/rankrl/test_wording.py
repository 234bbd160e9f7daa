"""Counts and their nouns."""

from __future__ import annotations

import pytest

from rankrl.errors import counted
from rankrl.report import run_folder


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 cores"), (1, "1 core"), (2, "2 cores"), (1024, "1,024 cores")]
)
def test_one_is_singular(count: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(count, "core") == text
    monkeypatch.setattr(run_folder, "usable_cores", lambda: count)
    assert run_folder.collect_setup(["rankrl"], 0)["Processor"].endswith(f", {text}")
    assert f", {text}, " in run_folder.hardware_line()
