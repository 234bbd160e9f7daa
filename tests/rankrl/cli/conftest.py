"""Runs the command line inside the test process."""

import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from command_line import BUDGET, QUICK, call, workplace
from matplotlib.figure import Figure

from rankrl.files import write_atomically
from rankrl.report import comparison, write
from rankrl.runs.run_folder import RunFolder


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path) -> Iterator[None]:
    with workplace(tmp_path):
        yield


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave figures of reports empty: they take half of a small run. The session's fixtures draw theirs."""
    monkeypatch.setattr("rankrl.report.figures.inline_svg", lambda *_: "<svg></svg>")
    for module in (comparison, write):
        monkeypatch.setattr(module, "save_figure", _no_figure)


def _no_figure(_: Figure, path: Path) -> None:
    write_atomically(path, b"")


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export compressed networks layer by layer, without trying other forms: that takes five exports more."""
    monkeypatch.setattr(
        "rankrl.verify.file_export.fastest_form", lambda network, *_, **__: (network, "staged", None)
    )


Command = Callable[..., None]


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
            with workplace(folder), (folder / "shown.txt").open("w") as shown, redirect_stdout(shown):
                call(*QUICK, *BUDGET, f"hydra.run.dir={folder / 'run'}")
        finally:
            os.umask(umask)

    return made_once("pipeline", fill) / "run"


@pytest.fixture(scope="session")
def training(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """The folder of one finished `task=train`, for all tests to copy."""

    def fill(folder: Path) -> None:
        with workplace(folder):
            call(*QUICK, "task=train", f"hydra.run.dir={folder / 'run'}")

    return made_once("training", fill) / "run"


@pytest.fixture(scope="session")
def shown_by_whole_run(whole_run: Path) -> str:
    return (whole_run.parent / "shown.txt").read_text()


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
        assert all(RunFolder(path).holds_results for path in Path("runs").glob("*"))
        assert not Path("data").exists()
        return message

    return run
