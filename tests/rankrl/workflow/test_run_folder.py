"""When a folder counts as that of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankrl.errors import ConfigError
from rankrl.workflow.run_folder import RunFolder

RESULTS = (
    "metrics.json",
    "plan.json",
    "episodes.csv",
    "state/masks.safetensors",
    "searches/tpe-0/episodes.csv",
)


def written(folder: Path, name: str) -> RunFolder:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    return RunFolder(folder)


@pytest.mark.parametrize("name", RESULTS)
def test_a_folder_with_results_belongs_to_its_configuration(name: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.prepare()
    folder.claim({"seed": 0}, [])
    assert written(tmp_path, name).holds_results
    folder.claim({"seed": 0}, [])
    folder.claim({"seed": 1}, [], resume=True)
    with pytest.raises(ConfigError, match="seed"):
        folder.claim({"seed": 2}, [])


@pytest.mark.parametrize("name", [".hydra/config.yaml", "state/configuration.json", "rankrl.log"])
def test_a_folder_that_has_got_nowhere_is_free(name: str, tmp_path: Path) -> None:
    assert not written(tmp_path, name).holds_results
