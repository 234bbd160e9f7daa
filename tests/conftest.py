"""Settings that hold for the whole test suite."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import absl.logging
import pytest
import torch
from filelock import FileLock
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_store import ConfigStore
from hypothesis import HealthCheck, settings

from rankrl.config.folder import config_folder

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


@pytest.fixture(scope="session", autouse=True)
def _onnx_functions_are_listed_once() -> Iterator[None]:
    """Let all exports share the lists of operations and of onnxscript's functions, which torch makes anew.

    For each operator set they are always the same, and to make them takes half of a small network's export.
    """
    try:
        from torch.onnx._internal._lazy_import import onnxscript_apis
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        listed = vars(ONNXRegistry)["from_torchlib"].__func__
    except (ImportError, KeyError):  # another version of torch: exports take longer, that is all
        yield
        return

    @cache
    def functions() -> tuple[Any, ...]:
        return tuple(type(onnxscript_apis).__getattr__(onnxscript_apis, "get_torchlib_ops")())

    whole = cache(listed)

    def registry(kind: type[Any], *args: Any, **options: Any) -> Any:
        found = copy.copy(whole(kind, *args, **options))
        found.functions = {name: list(each) for name, each in found.functions.items()}
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(onnxscript_apis), "get_torchlib_ops", functions)
        patch.setattr(ONNXRegistry, "from_torchlib", classmethod(registry))
        # All operators are looked up once for each of thirty namespaces, twice an export.
        looked_up = getattr(torch._export.utils, "_materialize_cpp_cia_ops", None)
        if looked_up is not None:
            patch.setattr(torch._export.utils, "_materialize_cpp_cia_ops", cache(looked_up))
        yield


class _Copying:
    """A repository of Hydra's whose configurations may be written to."""

    def __init__(self, repository: Any) -> None:
        self._repository = repository

    def __getattr__(self, name: str) -> Any:
        return getattr(self._repository, name)

    def load_config(self, config_path: str) -> Any:
        found = self._repository.load_config(config_path=config_path)
        return found and dataclasses.replace(found, config=copy.deepcopy(found.config))


def _sources(repository: Any) -> tuple[str, ...] | None:
    """Return what names the sources of configurations, or None with one that a test may write to."""
    ours = "pkg://", "structured://", f"file://{config_folder()}"
    found = tuple(source.full_path() for source in repository.get_sources())
    return found if all(each.startswith(ours) for each in found) else None


@pytest.fixture(scope="session", autouse=True)
def _hydra_reads_its_files_once() -> Iterator[None]:
    """Let compositions share what Hydra reads, and what it composes before the values given are set.

    Its store of configurations is copied whole for each composition, and every file is read again; the
    choices of groups that tests compose are few, though. Folders that belong to no package are read as ever.
    """
    read: dict[Any, Any] = {}
    merged: dict[Any, Any] = {}
    load, compose = ConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list

    def load_config(self: ConfigRepository, config_path: str) -> Any:
        sources = _sources(self)
        if sources is None:
            return load(self, config_path)
        if (sources, config_path) not in read:
            read[sources, config_path] = load(self, config_path)
        found = read[sources, config_path]
        own = {name: copy.deepcopy(getattr(found, name)) for name in ("header", "defaults_list") if found}
        return found and dataclasses.replace(found, **own)

    def composed(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
        sources = _sources(repo)
        if sources is None:
            return compose(self, defaults, _Copying(repo))
        key = sources, *(dataclasses.astuple(each) for each in defaults)
        if key not in merged:
            merged[key] = compose(self, defaults, _Copying(repo))
        return copy.deepcopy(merged[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigStore, "__deepcopy__", lambda store, _: store, raising=False)
        patch.setattr(ConfigRepository, "load_config", load_config)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", composed)
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
