"""The groups offer what the registries hold; the files of the configuration tree hold what differs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from command_line import check_overrides
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from decomposition import list_formats
from optim import list_optimizers
from pruning import list_pruners
from rankrl.cli.config.schema import (
    GROUPS,
    AppConfig,
    config_folder,
    group_choices,
    group_names,
    plain,
    store_groups,
)
from rankrl.data import list_datasets
from rankrl.errors import ConfigError
from rankrl.models import list_models
from rankrl.plan_search.scores.rewards import _REWARDS, list_rewards, register_reward
from rankrl.plan_search.selectors import list_selectors
from rankrl.runs.tracking import list_trackers

FILES = sorted(path for path in config_folder().rglob("*.yaml") if "hydra" not in path.parts)
CHOICES = [(group, choice) for group in GROUPS for choice in GROUPS[group].known()]


def composed(*overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        config: Any = OmegaConf.to_container(hydra.compose("config", list(overrides)))
    return config


def leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.mark.parametrize(
    ("name", "registered"),
    [
        ("selector", list_selectors()),
        ("reward", list_rewards()),
        ("decomposition", [*list_formats(), "auto"]),
        ("dataset", list_datasets()),
        ("model", list_models()),
        ("optim", list_optimizers()),
        ("tracking", [*list_trackers(), "none"]),
        ("pruner", [each.name for each in list_pruners()]),
    ],
)
def test_what_is_registered_can_be_chosen_and_hydra_lists_it(name: str, registered: list[str]) -> None:
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        listed = GlobalHydra.instance().config_loader().get_group_options(name)
    assert listed == group_choices(name) == sorted(registered)


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_a_choice_names_itself(group: str, choice: str, with_each_choice: dict[str, Any]) -> None:
    assert with_each_choice[f"{group}={choice}"][group][GROUPS[group].key] == choice


def test_hydra_has_the_groups_that_messages_list() -> None:
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        listed = GlobalHydra.instance().config_loader().list_groups("")
    assert set(group_names()) <= set(listed)


def test_a_reward_that_is_registered_later_can_be_chosen_too() -> None:
    with _REWARDS.restored():

        @register_reward("thrifty", "the metric per kept parameter")
        def thrifty(*, power: float = 1.5) -> Any:
            return lambda evaluation: evaluation.score / evaluation.params_kept**power

        store_groups()
        assert composed("reward=thrifty", "reward.power=2")["reward"] == {"name": "thrifty", "power": 2}


def test_a_file_of_ones_own_holds_what_differs(tmp_path: Path) -> None:
    (tmp_path / "selector").mkdir()
    (tmp_path / "selector" / "careful.yaml").write_text("defaults: [bayes]\nstep: 0.1\n")
    found = composed(f"hydra.searchpath=[file://{tmp_path}]", "selector=careful", "selector.candidates=2")
    assert found["selector"] == {**composed("selector=bayes")["selector"], "step": 0.1, "candidates": 2}


@pytest.mark.parametrize("group", ["selector", "pruner", "dataset"])
def test_an_option_that_a_choice_has_not_is_refused_by_name(group: str) -> None:
    for added in ("", "+"):
        with pytest.raises(ConfigError, match="nothing_such"):
            check_overrides([f"{added}{group}.nothing_such=1"])


def test_a_sweep_with_a_pattern_finds_choices_without_files() -> None:
    check_overrides(["-m", "selector=glob(bayes*)", "selector.step=0.1"])
    with pytest.raises(ConfigError, match=r"selector\.step"):  # ddpg has no such option
        check_overrides(["-m", "selector=glob(*)", "selector.step=0.1"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(config_folder()).as_posix())
def test_files_hold_only_what_differs(path: Path) -> None:
    """A value of a file is neither the schema's default nor that of the registered thing that it chooses."""
    content = yaml.safe_load(path.read_text())
    content.pop("defaults", None)
    content.pop("hydra", None)
    default = dict(leaves(plain(AppConfig())))
    everywhere = "@package _global_" in path.read_text()
    group = "" if everywhere or path.parent.name == "configs" else f"{path.parent.name}."
    key = GROUPS[group[:-1]].key if group[:-1] in GROUPS else None
    written = {f"{group}{name}": value for name, value in leaves(content) if name != key}
    assert not {name: value for name, value in written.items() if default.get(name, "absent") == value}


def test_every_file_begins_with_an_explanation() -> None:
    for path in config_folder().rglob("*.yaml"):
        assert path.read_text().startswith("# "), path


@pytest.mark.parametrize("group", [name for name in GROUPS if name not in ("decomposition", "optim")])
def test_every_default_of_a_choice_is_its_owners(group: str, with_each_choice: dict[str, Any]) -> None:
    compared = 0
    for choice in GROUPS[group].known():
        held = with_each_choice[f"{group}={choice}"][group]
        known: dict[str, Any] = {}
        for owner in reversed(GROUPS[group].owners(choice)):
            parameters = inspect.signature(owner).parameters if callable(owner) else {}
            known |= {name: each.default for name, each in parameters.items()}
        options = {**held, **held.get("options", {})}
        for name in (options.keys() & known.keys()) - OTHERWISE.get(group, set()):
            default = "???" if known[name] is inspect.Parameter.empty else known[name]
            assert options[name] == (list(default) if isinstance(default, tuple) else default), (choice, name)
            compared += 1
    assert compared >= 3


# What signatures say otherwise: defaults made by factories, the scope that suits a criterion, the folder that
# a dataset's reader is handed, and arguments that are no options.
OTHERWISE = {
    "pruner": {"push_pull", "strengths", "scope", "temperature"},
    "dataset": {"root", "name"},
    "model": {"name"},
}
