"""The configuration tree offers what the registries hold, with the defaults that the code has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import optim
from decomposition import list_formats
from pruning import list_pruners
from rankrl.data import list_datasets
from rankrl.models import list_models
from rankrl.plan_search.rewards import list_rewards
from rankrl.selectors import list_selectors, selector_options
from rankrl.tracking import list_trackers
from rankrl.workflow.pruner_options import pruner_defaults

PRUNERS = [pruner.name for pruner in list_pruners()]
CONFIGS = Path(__file__).parents[2] / "configs"


def group(name: str) -> dict[str, Any]:
    files = (CONFIGS / name).glob("*.yaml")
    return {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in files}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "key", "registered"),
    [
        ("selector", "name", list_selectors()),
        ("reward", "name", list_rewards()),
        ("decomposition", "format", [*list_formats(), "auto"]),
        ("dataset", "name", list_datasets()),
        ("model", "architecture", list_models()),
        ("optim", "name", optim.list_optimizers()),
        ("tracking", "name", [*list_trackers(), "none"]),
        ("pruner", "name", PRUNERS),
    ],
)
def test_every_registered_name_has_its_file(name: str, key: str, registered: list[str]) -> None:
    assert {stem: content[key] for stem, content in group(name).items()} == {
        each: each for each in registered
    }


@pytest.mark.parametrize("name", list_selectors())
def test_selector_files_hold_the_defaults_of_the_code(name: str) -> None:
    written = {key: value for key, value in group("selector")[name].items() if key != "name"}
    known = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in selector_options(name).items()
    }
    assert written == known


@pytest.mark.parametrize("name", PRUNERS)
def test_pruner_files_hold_the_defaults_of_the_code(name: str) -> None:
    written = {key: value for key, value in group("pruner")[name].items() if key != "name"}
    assert written == pruner_defaults(name)


def test_every_file_begins_with_an_explanation() -> None:
    for path in CONFIGS.rglob("*.yaml"):
        assert path.read_text().startswith("# "), path
