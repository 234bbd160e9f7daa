"""Runs sweeps inside the test process: the accuracy of a small network on digits, by default."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from rankrl.cli.app import main
from rankrl.models import create_model, save_checkpoint

Sweep = Callable[..., int]
Command = Callable[[Sequence[str]], int]

TINY = ("task=evaluate", "model=conv4", "tracking=csv")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder with an own cache, and undo what Hydra does to the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANKRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    GlobalHydra.instance().clear()
    root.handlers, root.level = handlers, level


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command line, word by word, in this process; returns the exit code."""

    def run(words: Sequence[str]) -> int:
        monkeypatch.setattr(sys, "argv", [*words])
        GlobalHydra.instance().clear()
        try:
            main()
        except SystemExit as left:
            return int(left.code or 0)
        return 0

    return run


@pytest.fixture
def sweep(command: Command) -> Sweep:
    """Run `rankrl -m TINY arguments hydra.sweep.dir=sweep` beside `w.safetensors`; returns the exit code."""
    save_checkpoint(create_model("conv4", input_shape=(1, 8, 8), num_classes=10), Path("w.safetensors"))

    def run(*arguments: str) -> int:
        weights = [] if "checkpoint" in str(arguments) else ["model.checkpoint=w.safetensors"]
        return command(["rankrl", "-m", *TINY, *weights, *arguments, "hydra.sweep.dir=sweep"])

    return run
