"""What the command line is checked with is what Hydra runs: folders and files that its flags name count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from command_line import check_overrides
from omegaconf.errors import ReadonlyConfigError

from rankrl.cli.app import checked_arguments
from rankrl.cli.config import compose
from rankrl.cli.config.compose import composing, help_page, parsed_flags
from rankrl.cli.config.schema import store_groups
from rankrl.errors import ConfigError


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
