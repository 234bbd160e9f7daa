"""Counts and their nouns."""

from __future__ import annotations

import pytest

from rankrl.errors import counted
from rankrl.report import provenance


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 cores"), (1, "1 core"), (2, "2 cores"), (1024, "1,024 cores")]
)
def test_one_is_singular(count: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(count, "core") == text
    monkeypatch.setattr(provenance, "usable_cores", lambda: count)
    assert provenance.collect_setup(["rankrl"], 0)["Processor"].endswith(f", {text}")
    assert f", {text}, " in provenance.hardware_line()
