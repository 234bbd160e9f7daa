"""Groups offer what is registered, files hold what differs; a command is checked with what Hydra runs."""

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import hydra
import pytest
import yaml
from command_line import check_overrides
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from omegaconf.errors import ReadonlyConfigError

from decomposition import list_formats
from optim import list_optimizers
from pruning import list_pruners
from rankrl.cli.app import checked_arguments
from rankrl.cli.config import compose
from rankrl.cli.config.compose import composing, help_page, parsed_flags
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an experiment, a variant of a selector, and a main file."""
    for name, text in {
        "experiment/mine": "# @package _global_\ndefaults: [override /model: conv4]\nseed: 3\n",
        "selector/careful": "defaults: [bayes]\nstep: 0.1\n",
        "ours": "defaults: [config, _self_]\nseed: 4\n",
    }.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_choices_in_a_users_folder_are_found(folder: Path) -> None:
    arguments = ["experiment=mine", "selector=careful", "selector.candidates=2", "--config-dir", str(folder)]
    check_overrides(arguments)
    with composing(parsed_flags(arguments)) as composed:
        config = composed(parsed_flags(arguments).overrides)
        assert "first_run, icassp2020, mine" in help_page(config)
    assert (config.model.architecture, config.seed, config.selector.step) == ("conv4", 3, 0.1)


def test_sweeps_over_choices_in_a_users_folder_are_tried_one_by_one(folder: Path) -> None:
    check_overrides(["-m", "-cd", str(folder), "selector=glob(*ful)", "selector.step=0.2"])
    with pytest.raises(ConfigError, match=r"selector\.step.*[^ ]"):
        check_overrides(["-m", "-cd", str(folder), "selector=random,careful", "selector.step=0.2"])


def test_a_main_file_of_ones_own_counts(folder: Path) -> None:
    arguments = ["--config-dir", str(folder), "--config-name=ours"]
    check_overrides(arguments)
    with composing(parsed_flags(arguments)) as composed:
        assert composed([]).seed == 4
    with composing() as composed:
        assert composed([]).seed == 0
    with pytest.raises(ConfigError, match=r"serch\.episodes.*Did you mean 'search\.episodes'"):
        check_overrides([*arguments, "serch.episodes=3"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config-path", "none"], r"config directory '/\S+/none' exists"),
        (["--config-path", "{}"], r"primary config 'config'"),
        (["--config-dir", "{}", "--config-name=theirs"], r"primary config 'theirs'"),
        (["--config-dir", "{}", "experiment=min"], r"choose from .*first_run, icassp2020, mine.*'mine'"),
    ],
)
def test_what_is_not_in_a_users_folder_is_named(folder: Path, arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_overrides([each.format(folder) for each in arguments])


@pytest.mark.parametrize(
    ("arguments", "times"),
    [
        (["task=train"], 1),
        (["experiment=first_run"], 1),
        (["task=train", "--help"], 1),
        (["-m", "task=train", "seed=0,1"], 2),  # and one of them once more for the folders' longest name
    ],
)
def test_the_checks_of_a_command_compose_the_same_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: Sequence[str], times: int
) -> None:
    monkeypatch.chdir(tmp_path)
    mock = Mock(wraps=compose.compose)
    monkeypatch.setattr(compose, "compose", mock)
    store_groups()
    checked_arguments(arguments)
    assert mock.call_count == times


def test_what_is_composed_for_several_is_written_by_none() -> None:
    with composing() as composed:
        config = composed(["seed=3"])
        assert composed(["seed=3"]) is config
        assert config.hydra.overrides.task == ["seed=3"]
        with pytest.raises(ReadonlyConfigError):
            config.seed = 4


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("budget.params=${oc.decode:${oc.env:SHARE,0.25}}", 0.5),
        ("budget.params='${oc.decode:${oc.env:NONE,0.25}}'", 0.25),
    ],
)
def test_numbers_are_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, argument: str, expected: float
) -> None:
    monkeypatch.setenv("SHARE", "0.5")
    arguments = compose.readable_arguments([argument])
    with composing(parsed_flags(arguments)) as composed:
        values = compose.plain_values(composed(arguments))
    check_overrides(arguments)
    assert values["budget"]["params"] == expected


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
