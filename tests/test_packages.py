"""Which folder may import which, and what packages export: documented and complete; extras are optional."""

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = ("decomposition", "pruning", "optim")
UPPER = "rankrl"
# Modules beside the folders that anything there may import; the others are for users, and import folders.
COMMON = {
    "decomposition": {"cache", "errors", "files", "progress", "registry"},
    "rankrl": {"device", "errors", "files", "option_types", "registration", "state_file"},
}


def modules(package: str) -> dict[str, Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}


def imports(path: Path) -> Iterator[str]:
    """Yield what a module imports anywhere in it, names as parts of their modules."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folder(name: str) -> str:
    """Return the folder of a module or of a name in one; a module that users call is one of its own."""
    package, *rest = name.split(".")
    place = ROOT / package
    for part in rest:
        if not (place / part).is_dir():
            break
        place = place / part
    if place.parent == ROOT and package in COMMON and rest and (place / f"{rest[0]}.py").exists():
        return package if rest[0] in COMMON[package] else f"{package}.{rest[0]}"
    return ".".join(place.relative_to(ROOT).parts)


@pytest.mark.parametrize("package", [*LIBRARIES, UPPER])
def test_folders_import_one_another_in_no_circle(package: str) -> None:
    graph: dict[str, set[str]] = {}
    for name, path in modules(package).items():
        if name == f"{package}.__init__":
            continue
        needed = {folder(each) for each in imports(path) if each.split(".")[0] == package}
        graph.setdefault(folder(name), set()).update(needed - {folder(name)})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("package", LIBRARIES)
def test_a_library_knows_neither_the_others_nor_what_is_built_on_them(package: str) -> None:
    others = {*LIBRARIES, UPPER, "hydra", "omegaconf"} - {package}
    for path in modules(package).values():
        assert others.isdisjoint(each.split(".")[0] for each in imports(path)), path


def test_hydra_stops_at_the_command_line() -> None:
    above = ("cli", "runs/sweeps")
    for path in modules(UPPER).values():
        if not path.relative_to(ROOT / UPPER).as_posix().startswith(above):
            assert {"hydra", "omegaconf"}.isdisjoint(each.split(".")[0] for each in imports(path)), path


PACKAGES = (*LIBRARIES, UPPER)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_has_a_docstring(package: str) -> None:
    module = importlib.import_module(package)
    exported = {name: getattr(module, name) for name in module.__all__}
    defined = {
        name: each for name, each in exported.items() if inspect.isclass(each) or inspect.isfunction(each)
    }
    assert len(defined) > 5
    assert not [name for name, each in defined.items() if not inspect.getdoc(each)]


@pytest.mark.parametrize("package", PACKAGES)
def test_lists_of_arguments_are_complete(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        function, text = getattr(module, name), inspect.getdoc(getattr(module, name)) or ""
        if inspect.isfunction(function) and "\nArgs:" in text:
            missing = [
                each
                for each in inspect.signature(function).parameters
                if not re.search(rf"^\s+\**{each}: ", text, re.MULTILINE)
            ]
            assert not missing, f"{package}.{name}"


MODULES = {"hydra_submitit_launcher": {"hydra_plugins", "submitit"}}
"""Of packages whose modules are called otherwise."""


def optional() -> set[str]:
    """The modules of all extras but `dev`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
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
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    found = {path.name: wrong for path in files if (wrong := names.intersection(imported(path)))}
    assert not found, 'import it in the test, or as pytest.importorskip("...")'
