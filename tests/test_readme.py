"""What the README shows works: its Python runs, its commands are understood, its files exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from rankrl.config.overrides import check_overrides
from rankrl.selectors import list_selectors
from rankrl.tasks import list_tasks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip()]


def test_readme_opens_with_the_two_commands() -> None:
    assert commands()[:2] == ["make run", "make test"]
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"run", "test"} <= set(targets)


@pytest.mark.parametrize("command", [c for c in commands() if "rankrl" in c])
def test_every_command_is_understood(command: str) -> None:
    words = shlex.split(command)
    arguments = words[words.index("rankrl") + 1 :]
    check_overrides(arguments)
    task = next((a.removeprefix("task=") for a in arguments if a.startswith("task=")), "pipeline")
    assert task in list_tasks()


def test_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()).eval()
    images = torch.randn(32, 3, 32, 32)
    expected = model(images).detach()
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    scope = {
        "model": model,
        "images": images,
        "accuracy_on_heldout_images": lambda network: -float((network(images) - expected).square().mean()),
    }
    exec(compile(code.replace("episodes=100", "episodes=3"), "README.md", "exec"), scope)
    assert (tmp_path / "small.onnx").stat().st_size > 0
    assert (tmp_path / "small.safetensors").stat().st_size > 0


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_task_and_selector_is_named() -> None:
    for name in (*list_tasks(), *list_selectors()):
        assert f"`{name}`" in README, name
