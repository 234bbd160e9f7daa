"""Where the Hydra configuration tree lies."""

from __future__ import annotations

from pathlib import Path


def config_folder() -> Path:
    """Return the folder `configs`: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"
