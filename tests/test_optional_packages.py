"""Tests are collected where packages of the extras are missing, and those that need one are skipped there."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
MODULES = {"hydra_submitit_launcher": {"hydra_plugins", "submitit"}}
"""Of packages whose modules are called otherwise."""


def optional() -> set[str]:
    """The modules of all extras but `dev`."""
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [
        each for name, extra in project["optional-dependencies"].items() if name != "dev" for each in extra
    ]
    names = (re.split(r"[^\w-]", each)[0].replace("-", "_") for each in needed)
    return {module for name in names for module in MODULES.get(name, {name})}


def imported(path: Path) -> Iterator[str]:
    """The packages that a file imports when it is imported itself."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_nothing_that_is_optional_is_imported_by_a_whole_file() -> None:
    names = optional()
    assert {"optuna", "cmaes", "ray", "openvino", "mkdocs"} <= names
    files = [*TESTS.rglob("*.py"), *(TESTS.parent / "scripts").glob("*.py")]
    found = {path.name: wrong for path in files if (wrong := names.intersection(imported(path)))}
    assert not found, 'import it in the test, or as pytest.importorskip("...")'
