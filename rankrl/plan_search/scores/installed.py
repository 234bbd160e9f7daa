"""Which modules are installed rather than written by the user, wherever they were installed to.

Packages lie in the environment, in the user's folder (`pip install --user`), in those of the Python that an
environment was made from (`--system-site-packages`), in Debian's, in conda's, in a folder of PYTHONPATH
(`pip install --target`), or in a zip archive. An editable installation is the user's own code.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

OWN_PACKAGES = ("rankrl", "decomposition", "pruning", "optim")
_FOLDERS_OF_PACKAGES = {"site-packages", "dist-packages"}
_STANDARD = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")})


@functools.cache
def is_installed(module: str) -> bool:
    """Return whether a module is Python's, ours, or that of an installed distribution.

    Args:
        module: Its dotted name. One that has no file, such as what a C extension makes, goes with the package
            above it; with none above it, it is the user's.
    """
    top, _, below = module.partition(".")
    if top == "__main__":
        return False
    if top in OWN_PACKAGES:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(file, str):  # a user's own file may be named as one of Python's modules, test.py say
        return top in sys.stdlib_module_names or (bool(below) and is_installed(module.rpartition(".")[0]))
    for path in {Path(file).absolute(), Path(file).resolve()}:  # site-packages may be a link, or hold links
        if _FOLDERS_OF_PACKAGES & set(path.parts) or any(each in path.parents for each in _STANDARD):
            return True
    return top in _distributed(_root(module, Path(file)))


def version(name: str) -> str:
    """Return the version of the package that a dotted name begins with; empty where it says none."""
    found = getattr(sys.modules.get(name.partition(".")[0]), "__version__", "")
    return found if isinstance(found, str) else ""


def _root(module: str, file: Path) -> Path:
    """Return the folder or archive from which a module was imported."""
    above = module.count(".") + (file.stem == "__init__")
    return file.absolute().parents[above]


@functools.cache
def _distributed(root: Path) -> frozenset[str]:
    """Return the top-level modules of the distributions that were installed into a folder or archive.

    An `.egg-info` may lie beside sources, so only what has a record of installed files counts.
    """
    found = metadata.distributions(path=[str(root)])
    files = [file for each in found if each.read_text("RECORD") is not None for file in each.files or ()]
    return frozenset(file.parts[0].partition(".")[0] for file in files)
