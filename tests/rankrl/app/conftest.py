"""Runs the command line inside the test process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import BUDGET, QUICK, with_effect
from hydra.core.global_hydra import GlobalHydra

from rankrl.app import main


@contextmanager
def workplace(folder: Path) -> Iterator[None]:
    """Work in an empty folder with an own cache, and undo what Hydra does to the process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RANKRL_CACHE", str(folder / "cache"))
        patch.setattr(sys, "path", list(sys.path))
        yield
        GlobalHydra.instance().clear()
    root.handlers, root.level = handlers, level


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path) -> Iterator[None]:
    with workplace(tmp_path):
        yield


Command = Callable[..., None]


def call(*arguments: str) -> None:
    """Call `rankrl` as the console would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["rankrl", *with_effect(*arguments)])
        GlobalHydra.instance().clear()
        main()


@pytest.fixture
def rankrl() -> Command:
    """Call `rankrl(*arguments)` as the console would."""
    return call


@pytest.fixture(scope="session")
def whole_run(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """The folder of one finished pipeline, for all tests to read."""

    def fill(folder: Path) -> None:
        umask = os.umask(0o022)
        try:
            with workplace(folder):
                call(*QUICK, BUDGET, f"hydra.run.dir={folder / 'run'}")
        finally:
            os.umask(umask)

    return made_once("pipeline", fill) / "run"


@pytest.fixture(scope="session")
def dense(whole_run: Path) -> str:
    """The argument that names the dense network trained there."""
    return f"model.checkpoint={whole_run / 'dense.safetensors'}"


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
