"""Settings that hold for the whole test suite."""

import gc
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import absl.logging
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

settings.register_profile(
    "quick",
    deadline=None,
    derandomize=True,
    max_examples=8,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=25)  # `make test-all`
settings.load_profile("quick")


# TensorBoard brings absl, whose handler closes the stream that was sys.stderr when it was imported as soon as
# Hydra sets up its own logging: pytest's, if that is during a test.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__


def pytest_collection_finish() -> None:
    """Let garbage collections pass over all that the tests found: packages, tests, parameters.

    They are rarer, too: with torch's and onnxscript's objects they took a tenth of the whole time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _folder(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value and Path(value).is_dir() else None


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real datasets (`RANKRL_DATA`); the test is skipped without it."""
    folder = _folder("RANKRL_DATA")
    if folder is None:
        pytest.skip("set RANKRL_DATA to the folder that holds cifar10.npz")
    return folder


@pytest.fixture(scope="session")
def checkpoint_folder() -> Path:
    """The folder of published CIFAR checkpoints (`RANKRL_CHECKPOINTS`); skipped without it."""
    folder = _folder("RANKRL_CHECKPOINTS")
    if folder is None:
        pytest.skip("set RANKRL_CHECKPOINTS to the folder that holds cifar10-resnet20.th")
    return folder


MadeOnce = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Return `made_once(name, fill)`: a folder that one process of the test run fills for all of them.

    What is in it belongs to every test; none writes there.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # a worker's own folder lies in that of the whole run

    def made(name: str, fill: Callable[[Path], None]) -> Path:
        folder, whole = base / "made-once" / name, base / "made-once" / f"{name}.whole"
        folder.parent.mkdir(exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not whole.exists():
                shutil.rmtree(folder, ignore_errors=True)  # what a failed attempt left
                folder.mkdir()
                fill(folder)
                whole.touch()
        return folder

    return made
