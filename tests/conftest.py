"""Settings that hold for the whole test suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "rankrl",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("rankrl")


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
