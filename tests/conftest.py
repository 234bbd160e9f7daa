"""Settings that hold for the whole test suite."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hydra.core.config_store import ConfigStore
from hypothesis import HealthCheck, settings

settings.register_profile(
    "rankrl",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("rankrl")


def pytest_collection_finish() -> None:
    """Let garbage collections pass over all that the tests found: packages, tests, parameters."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _onnx_functions_are_listed_once() -> Iterator[None]:
    """Let all exports share one list of onnxscript's functions, which torch makes anew for each.

    The list is always the same, and to make it their sources are parsed: half of a small network's export.
    """
    try:
        from torch.onnx._internal._lazy_import import onnxscript_apis
    except ImportError:  # another version of torch: exports take longer, that is all
        yield
        return

    @cache
    def functions() -> tuple[Any, ...]:
        return tuple(type(onnxscript_apis).__getattr__(onnxscript_apis, "get_torchlib_ops")())

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(onnxscript_apis), "get_torchlib_ops", functions)
        yield


@pytest.fixture(scope="session", autouse=True)
def _hydra_copies_no_store() -> Iterator[None]:
    """Let Hydra read its store of configurations in place, which it copies whole for each composition.

    What it loads from the store it copies once more, so nothing writes there.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigStore, "__deepcopy__", lambda store, _: store, raising=False)
        yield


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
