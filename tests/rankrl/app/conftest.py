"""Runs the command line inside the test process."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from rankrl.app import main

QUICK = (
    "model=conv4",
    "train.epochs=2",
    "train.optim.lr=0.02",
    "search.episodes=3",
    "search.images=100",
    "calibration.images=64",
    "decomposition.candidates=4",
    "decomposition.iterations=5",
    "decomposition.final_iterations=10",
    "decomposition.final_starts=1",
    "finetune.epochs=1",
    "export.runs=3",
)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder with an own cache, and undo what Hydra does to the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANKRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    GlobalHydra.instance().clear()
    root.handlers, root.level = handlers, level


Command = Callable[..., None]


@pytest.fixture
def rankrl(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Call `rankrl(*arguments)` as the console would."""

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["rankrl", *arguments])
        GlobalHydra.instance().clear()
        main()

    return run


@pytest.fixture
def refused(rankrl: Command, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call a command that must be refused; returns its one paragraph."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            rankrl(*arguments)
        assert stopped.value.code == 2
        message = capfd.readouterr().err.strip()
        assert "Traceback" not in message
        assert message.startswith("rankrl: ")
        assert "\n" not in message
        return message

    return run


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
