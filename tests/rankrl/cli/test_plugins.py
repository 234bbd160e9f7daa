"""What other packages register is offered, checked and explained like ours."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankrl.cli.app import checked_arguments
from rankrl.cli.config.schema import store_groups
from rankrl.errors import ConfigError
from rankrl.plan_search.selectors.selector import _SELECTORS

Command = Callable[..., None]
PAGE = Path(__file__).parents[3] / "docs" / "extending.md"
ENTRY_POINTS = "fresh_selector-1.0.dist-info/entry_points.txt"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package of the page on adding, beside the others; what it registers goes with the test."""
    definition = re.search(
        r"(?s)```python\n([^`]*@register_selector.*?)```", PAGE.read_text(encoding="utf-8")
    )
    assert definition is not None
    folder = tmp_path / "site"
    (folder / ENTRY_POINTS).parent.mkdir(parents=True)
    (folder / "fresh_selector.py").write_text(definition[1])
    (folder / ENTRY_POINTS).with_name("METADATA").write_text("Name: fresh-selector\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(folder)
    with _SELECTORS.restored():
        yield folder
    sys.modules.pop("fresh_selector", None)
    store_groups()


@pytest.fixture
def installed(package: Path) -> None:
    (package / ENTRY_POINTS).write_text("[rankrl.plugins]\nfresh = fresh_selector\n")


def test_an_installed_package_is_listed(
    installed: None, rankrl: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    rankrl("selector=fresh", "--help")
    page = capfd.readouterr().out
    assert re.search(r"  fresh_selector +fresh-selector\n", page)
    assert re.search(r"  selector .* fresh,", page)
    assert "  count: 1\n" in page


def test_its_options_are_checked(installed: None) -> None:
    assert checked_arguments(["task=search", "selector=fresh", "selector.count=2"])
    with pytest.raises(ConfigError, match="Did you mean 'fresh'"):
        checked_arguments(["selector=frsh"])
    with pytest.raises(ConfigError, match=r"Did you mean 'selector\.count'"):
        checked_arguments(["selector=fresh", "selector.coutn=2"])
    with pytest.raises(ConfigError, match=r"selector\.count must be a whole number, got 'a'"):
        checked_arguments(["selector=fresh", "selector.count=a"])


def test_a_module_is_named_on_the_command_line_or_by_an_experiment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"selector=fresh is unknown.* needs plugins=\[MODULE\]"):
        checked_arguments(["selector=fresh"])
    own = tmp_path / "own" / "experiment" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(
        "# @package _global_\ndefaults: [{override /selector: fresh}]\nplugins: [fresh_selector]\n"
    )
    assert checked_arguments(["experiment=mine", "--config-dir", str(own.parents[1])])
    assert checked_arguments(["plugins=[fresh_selector]", "selector=fresh"])


@pytest.mark.parametrize(
    ("code", "reason"), [(None, "No module named 'broken'"), ("1 / 0", "ZeroDivisionError: division by zero")]
)
def test_a_module_that_cannot_be_imported_is_named(package: Path, code: str | None, reason: str) -> None:
    if code is not None:
        (package / "broken.py").write_text(code)
    with pytest.raises(ConfigError, match=rf"the plugin broken cannot be imported \(.*{reason}\)"):
        checked_arguments(["plugins=[broken]"])
    (package / ENTRY_POINTS).write_text("[rankrl.plugins]\nfresh = broken\n")
    with pytest.raises(ConfigError, match="mend or remove the package fresh-selector"):
        checked_arguments([])


@pytest.mark.slow
def test_a_search_by_it(rankrl: Command, installed: None) -> None:
    options = ("task=search", "model=conv4", "selector=fresh", "search.episodes=3", "search.images=50")
    quick = (
        "train.epochs=1",
        "dataset.train_images=64",
        "decomposition.candidates=2",
        "calibration.images=32",
    )
    rankrl(*options, *quick, "decomposition=tucker", "budget.params=0.6", "hydra.run.dir=run")
    assert '"fresh"' in Path("run/plan.json").read_text()


def test_the_leaderboard_takes_selectors_of_plugins(capfd: pytest.CaptureFixture[str]) -> None:
    import leaderboard

    given = ["--folder", "runs", "--rows", "rows.csv", "--selectors", "fresh:count=2"]
    with pytest.raises(SystemExit):
        leaderboard.parse(given)
    assert "there is no selector 'fresh'" in capfd.readouterr().err
    (chosen,) = leaderboard.parse([*given, "--plugins", "fresh_selector"]).selectors
    assert (chosen.selector, chosen.options) == ("fresh", {"count": 2})
