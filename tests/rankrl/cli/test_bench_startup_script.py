"""The benchmark of start-up measures processes of their own, and says what they said and left behind."""

from __future__ import annotations

import bench_startup as bench
import pytest

pytestmark = pytest.mark.slow


def test_both_tables_have_a_row_for_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "IMPORTS", ("json",))
    monkeypatch.setattr(bench, "COMMANDS", {"rankrl --version": ("--version",)})
    monkeypatch.setattr(bench, "MISTAKES", (("selector=ddgp",),))
    startup = bench.startup_table({"before": bench.HERE, "now": bench.HERE}, runs=1).splitlines()
    assert [line.count("|") for line in startup] == [6] * 4
    assert startup[3].startswith("| `rankrl --version` | ")
    row = bench.mistakes_table({"seconds": bench.HERE}, runs=1).splitlines()[-1]
    assert row.startswith("| `selector=ddgp` | ")
    assert "Did you mean 'ddpg'?" in row
    assert row.endswith(" | nothing |")


def test_what_a_process_says_and_leaves_is_recorded() -> None:
    code = "import sys, pathlib; pathlib.Path(sys.argv[1]).touch(); sys.exit('first\\nlast')"
    found = bench.timed(code, ["mess"], bench.HERE)
    assert (found.said, found.left) == ("last", ("mess",))
    assert 0 < found.processor <= found.wall * 4
