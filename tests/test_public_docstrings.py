"""What packages export is documented, and argument lists name every argument."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

PACKAGES = ("decomposition", "optim", "pruning", "rankrl")


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
