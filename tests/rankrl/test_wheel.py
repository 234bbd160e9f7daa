"""The wheel is complete: it works in an empty folder, away from the checkout."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    def build(folder: Path) -> None:
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )

    return next(made_once("wheel", build).glob("*.whl"))


def test_wheel_holds_packages_and_configuration(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"rankrl/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert configs <= names
    for package in ("rankrl", "decomposition", "pruning", "optim"):
        assert f"{package}/py.typed" in names
        assert f"{package}/__init__.py" in names
        sources = {
            str(path.relative_to(ROOT))
            for path in (ROOT / package).rglob("*.py*")
            if "pycache" not in str(path)
        }
        assert sources <= names
    assert "hydra_plugins/rankrl_launchers/__init__.py" in names
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "rankrl/report/templates").iterdir()}
    assert "rankrl/report/templates/page.html.jinja" in templates
    assert templates <= names
    assert not any(name.startswith(("tests/", "scripts/")) for name in names)


def test_command_works_from_the_wheel_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "empty").mkdir()
    code = (
        "import rankrl.cli.app, pathlib, sys;"
        f"assert pathlib.Path(rankrl.cli.app.__file__).is_relative_to({str(site)!r});"
        "sys.argv = ['rankrl', '--cfg', 'job']; rankrl.cli.app.main()"
    )
    # -P keeps the current folder off the path; the wheel comes before the editable checkout.
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "task: pipeline" in done.stdout
