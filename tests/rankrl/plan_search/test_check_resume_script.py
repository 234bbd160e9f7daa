"""The kill-and-resume check sees what differs, and nothing else."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import check_resume as script
import pytest
import torch

from rankrl.plan_search.run import run_search
from rankrl.plan_search.scores.history import EPISODES_FILE
from rankrl.plan_search.selectors import create_selector
from rankrl.plan_search.state import STATE_FILE, SearchState

pytestmark = pytest.mark.slow


def search(problem, evaluator, folder: Path) -> None:
    evaluator.restore({})
    selector = create_selector("tpe", problem, seed=1, episodes=6)
    run_search(problem, evaluator, selector, episodes=6, folder=folder).plan.save(folder / "plan.json")


def test_equal_searches_have_no_differences(small_problem, synthetic_evaluator, tmp_path) -> None:
    for name in ("first", "second"):
        search(small_problem, synthetic_evaluator, tmp_path / name)
    assert script.rows_on_disk(tmp_path / "first") == 6
    assert script.differences(tmp_path / "first", tmp_path / "second") == []


def test_every_kind_of_difference_is_named(small_problem, synthetic_evaluator, tmp_path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    search(small_problem, synthetic_evaluator, first)
    shutil.copytree(first, second)
    (second / "plan.json").write_text("{}")
    table = second / EPISODES_FILE
    table.write_text(table.read_text().replace("tpe", "changed", 1))
    state = SearchState.load(second / STATE_FILE)
    tensors = {
        **state.tensors,
        "rewards": torch.nextafter(state.tensors["rewards"], torch.tensor(9.0).double()),
    }
    SearchState(state.identity, state.rows[:-1], 99.0, tensors, state.values).save(second / STATE_FILE)
    assert script.differences(first, second) == ["plan.json", EPISODES_FILE, "array rewards", "state: rows"]


def test_a_search_is_killed_resumed_and_compared(tmp_path, monkeypatch) -> None:
    """With a stand-in for the command line, which needs seconds to start."""
    worker = Path(__file__).with_name("resume_worker.py")

    def start(folder: Path, options: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(worker), str(folder), "local", "12"]
        with folder.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    monkeypatch.setattr(script, "start", start)
    (kill,) = script.disturbed(tmp_path / "run", [], [5], 0.1, random.Random(0))
    assert kill >= 5
    assert script.rows_on_disk(tmp_path / "run") == 12


def test_a_failing_search_stops_the_check(tmp_path) -> None:
    (tmp_path / "run.log").write_text("the reason")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match=r"code 3:\nthe reason"):
        script.finish(process, tmp_path / "run")
