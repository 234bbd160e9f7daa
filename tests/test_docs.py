"""What the README and docs/ show works: pages are carried out from top to bottom in an empty folder.

Python blocks run as they are, but for those with a package that need not be here. Commands run on digits with
a small network and few episodes, sweeps over the first of their values; what needs a dataset, a launcher or a
package that is not here is only composed.
"""

import importlib
import inspect
import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
import make_config_reference
import numpy as np
import onnx
import pytest
import torch
from command_line import check_overrides, with_effect
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from small_graphs import convolutions, drawn, images, save_photos, with_state
from torch import nn

import rankrl
from decomposition.registry import Registry
from optim import list_optimizers
from pruning import list_pruners
from rankrl.cli.app import main
from rankrl.cli.config.schema import GROUPS, TASKS, config_folder, store_groups
from rankrl.onnx.runtimes import get_runtime, list_runtimes
from rankrl.plan_search.scores.rewards import register_reward
from rankrl.plan_search.selectors import list_selectors

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]

SMALL = {
    "train.epochs": "1",
    "train.optim.lr": "0.02",
    "search.episodes": "3",
    "search.images": "100",
    "calibration.images": "64",
    "decomposition.candidates": "4",
    "decomposition.iterations": "5",
    "decomposition.final_iterations": "10",
    "finetune.epochs": "1",
    "export.runs": "3",
}
# Registries that a page may add to; they are as before afterwards.
REGISTRIES = [
    ("decomposition.formats.tensor_format", "_FORMATS"),
    ("decomposition.choose.heuristics", "_HEURISTICS"),
    ("decomposition.operations", "_OPERATIONS"),
    ("rankrl.plan_search.selectors.selector", "_SELECTORS"),
    ("rankrl.plan_search.scores.rewards", "_REWARDS"),
    ("pruning.registry", "_PRUNERS"),
    ("optim.registry", "_records"),
    ("rankrl.runs.tracking", "_TRACKERS"),
    ("rankrl.onnx.runtimes", "_RUNTIMES"),
]
NEEDS_MORE = re.compile(
    r"dataset=(?:cifar|mnist|imagefolder)|experiment=|tracking=(?:mlflow|wandb)|hydra/launcher="
    r"|search.cluster=ray|[ =/](?:PATH|FOLDER|FILE|RUN)\b"
)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and content of every block of a page, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and line[0] != "#"]


def rankrl_arguments(command: str) -> list[str] | None:
    """The arguments of a `rankrl` command, or None for another one."""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    return words[1:] if words and words[0] == "rankrl" else None


def made_small(arguments: list[str]) -> list[str]:
    """The same command with little work: a small network, few episodes, the first value of each sweep."""
    if "-sc" in arguments or any(each.startswith("resume=") for each in arguments):
        return arguments
    given = {each.partition("=")[0]: each for each in arguments}
    small = dict(SMALL)
    kept = []
    for each in arguments:
        name, _, value = each.partition("=")
        if name in small:
            continue
        swept = "-m" in arguments and "," in value and not value.startswith(("[", "{"))
        kept.append(f"{name}={value.split(',')[0]}" if swept else each)
    network = [] if {"model", "weights", "bench"} & set(given) else ["model=conv4"]
    if "model=onnx" in arguments:  # how fast a network of this size could be is not to be told
        kept = ["budget.params=0.7" if each.startswith("budget.latency=") else each for each in kept]
        if "selector" not in given:  # greedy's plan is taken without a search
            del small["search.episodes"]
    shortened = [f"{name}={value}" for name, value in small.items()]
    added = [each for each in shortened if each.partition("=")[0] not in given]
    return list(with_effect(*network, *shortened, *kept, removable=added))


def run_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = rankrl_arguments(command)
    if arguments is None:
        for script in re.findall(r"scripts/\w+\.py", command):
            assert (ROOT / script).exists(), command
        return
    if "-sc" not in arguments:
        composed = [each for each in arguments if "launcher" not in each and not each.startswith("resume=")]
        check_overrides(composed)
    task = next((each.removeprefix("task=") for each in arguments if each.startswith("task=")), "pipeline")
    assert task in TASKS, command
    runtimes = [name for name in list_runtimes() if re.search(rf"\b{name}\b", command)]
    if NEEDS_MORE.search(command) or any(get_runtime(name).obstacle() for name in runtimes):
        return
    monkeypatch.setattr(sys, "argv", ["rankrl", *made_small(arguments)])
    GlobalHydra.instance().clear()
    code = None
    try:
        main()
    except SystemExit as left:
        code = left.code
    assert not code, command


def run_python(page: Path, code: str, scope: dict[str, Any]) -> None:
    name = re.match(r"# (\w+)\.py\n", code)
    if name is not None:
        Path(f"{name[1]}.py").write_text(code)
        importlib.invalidate_caches()
        code = f"from {name[1]} import *"  # as a plugin it is imported, not defined twice
    code = code.replace("episodes=100", "episodes=3")
    exec(compile(code, page.name, "exec"), scope)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An empty folder with an own cache; what Hydra and the pages do to the process is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANKRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RANKRL_DATA", str(tmp_path / "no-data"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    list_optimizers()  # which registers ours, else they would be forgotten too
    list_pruners()
    with ExitStack() as stack:
        for module, name in REGISTRIES:
            registry = getattr(importlib.import_module(module), name)
            if isinstance(registry, Registry):
                stack.enter_context(registry.restored())
            else:
                monkeypatch.setattr(sys.modules[module], name, dict(registry))
        yield monkeypatch
    for name in ("my_models", "my_selectors"):
        sys.modules.pop(name, None)
    GlobalHydra.instance().clear()
    root.handlers, root.level = handlers, level


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_can_be_carried_out_from_top_to_bottom(page: Path, workplace: pytest.MonkeyPatch) -> None:
    scopes = {"README": example_scope, "onnx": onnx_scope}
    scope: dict[str, Any] = scopes.get(page.stem, dict)()
    for language, content in blocks(page):
        if language == "python":
            run_python(page, content, scope)
        elif language in ("sh", "bash"):
            for command in commands(content):
                run_command(command, workplace)
    if page == README:
        assert Path("runs/fast/model.onnx").stat().st_size > 0
        assert Path("runs/fast/model.safetensors").stat().st_size > 0


def onnx_scope() -> dict[str, Any]:
    """What the page of ONNX files takes for granted: networks, inputs, labels, photos, recordings."""
    model = convolutions()
    model.graph.input[0].name = model.graph.node[0].input[0] = "frames"
    onnx.save(model, "net.onnx")
    save_photos(Path("photos"))
    onnx.save(with_state((0, 1, 2), [2, "n", 16]), "step.onnx")
    return {"frames": images(), "labels": np.arange(len(images())) % 5, "audio": drawn(12, 4, 16)}


def example_scope() -> dict[str, Any]:
    """What the README's example takes for granted: a model and images."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()).eval()
    images = torch.randn(32, 3, 32, 32)
    return {"model": model, "images": images}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_pictures_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


STUMBLES = re.compile(
    r"\bbeside\b|\bwhat becomes? of\b|\bis found by\b|\bwhich ones,|\bused to\b|\bnobody\b|\bfor who\b"
    r"|\bgo(?:es)? on\b|\banew\b|\bhand(?:s|ed)? back\b|\bfilled up\b|\bturned back\b|\bat hand\b"
    r"|\bknows? torch\b|\blets? expect\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_avoid_words_that_a_native_reader_stumbles_over(page: Path) -> None:
    assert not [line for line in page.read_text(encoding="utf-8").splitlines() if STUMBLES.search(line)]


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


def test_readme_opens_with_the_two_commands_and_a_short_example() -> None:
    shell = [line for language, content in blocks(README) if language == "sh" for line in commands(content)]
    assert shell[:2] == ["make run", "make test"]
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"run", "test"} <= set(targets)
    (example,) = [content for language, content in blocks(README) if language == "python"]
    assert len([line for line in example.splitlines() if line.strip()]) <= 15


def test_readme_names_every_task_and_selector_and_links_every_page() -> None:
    text = README.read_text()
    for name in (*TASKS, *list_selectors()):
        assert f"`{name}`" in text, name
    for page in PAGES[1:]:
        assert f"(docs/{page.name})" in text, page.name


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_documents_what_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    for package in ("rankrl", "decomposition", "pruning", "optim"):
        page = (tmp_path / "api" / package / "index.html").read_text(encoding="utf-8")
        exported = importlib.import_module(package)
        for name in exported.__all__:
            if inspect.isclass(getattr(exported, name)) or inspect.isfunction(getattr(exported, name)):
                assert re.search(rf'id="{package}\.{name}[".]', page), f"{package}.{name}"


@pytest.fixture(scope="session")
def reference(made_once: Callable[[str, Callable[[Path], None]], Path]) -> str:
    """The page of all options as it should be."""

    def fill(folder: Path) -> None:
        (folder / "page.md").write_text(make_config_reference.reference(), encoding="utf-8")

    return (made_once("reference", fill) / "page.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["selector", "reward", "pruner", "optimizer", "tracker"])
def test_what_the_page_on_adding_defines_is_explained_in_the_reference(
    kind: str, workplace: pytest.MonkeyPatch
) -> None:
    page = ROOT / "docs" / "extending.md"
    group = {"optimizer": "optim", "tracker": "tracking"}.get(kind, kind)
    before = set(GROUPS[group].known())
    code = next(text for _, text in blocks(page) if f"@register_{kind}" in text)
    run_python(page, code, {"model": nn.Linear(2, 2), "torch": torch})
    (name,) = set(GROUPS[group].known()) - before
    rows = list(make_config_reference.choice_options(group, name, GROUPS[group].node(name)))
    assert all(each.explanation and each.kind for each in rows)
    assert name in GROUPS[group].known()


@pytest.mark.slow
def test_what_the_page_on_adding_defines_keeps_the_contracts_that_it_shows(tmp_path: Path) -> None:
    page = ROOT / "docs" / "extending.md"
    code = "\n".join(text for language, text in blocks(page) if language == "python")
    (tmp_path / "test_page.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for contract in ("Format", "Selector", "Criterion", "Runtime"):
        assert f"({contract}Contract)" in code


@pytest.mark.slow
@pytest.mark.parametrize("of_file", [False, True], ids=["module", "file"])
def test_what_the_page_on_adding_defines_keeps_a_budget_in_bytes(
    of_file: bool, workplace: pytest.MonkeyPatch
) -> None:
    scope: dict[str, Any] = {"rankrl": rankrl}
    for language, content in blocks(ROOT / "docs" / "extending.md"):
        if language == "python" and ("@register_" in content or "model = " in content):
            run_python(ROOT / "docs" / "extending.md", content, scope)
    network, images = scope["model"], torch.randn(64, 3, 8, 8)
    options: dict[str, Any] = {"finetune": rankrl.TrainingRecipe(epochs=1, lr=1e-4, optimizer="rmsprop")}
    inputs: Any = images
    if of_file:
        rankrl.export_onnx(network, "net.onnx", (3, 8, 8))
        network, inputs, options = "net.onnx", images.numpy(), {}
    few = rankrl.SearchOptions(episodes=2)
    searched: dict[str, Any] = {"decomposition": "low_rank", "selector": "fresh", "search": few}
    score = None if of_file else lambda net: -float(net(images).square().mean())
    rankrl.search(network, inputs, score=score, reward="thrifty", bytes=0.5, **searched)
    for precisions in (None, ("float32", "int8_weights")):
        searched["decomposition"] = rankrl.DecompositionOptions(format="low_rank", precisions=precisions)
        target = f"small_{precisions is None}"
        result = rankrl.compress(network, inputs, target, bytes=0.5, **searched, **options)
        session = get_runtime("reference").load(Path(target) / "model.onnx", 1)
        assert session.run(images[:2].numpy())[0].shape == (2, 16, 6, 6)
        assert result.after["bytes"] <= 0.5 * result.before["bytes"]


def test_an_option_that_nothing_explains_is_named_by_the_script(workplace: pytest.MonkeyPatch) -> None:
    register_reward("thrifty", "the metric per kept parameter")(lambda *, power=1.0: lambda _: power)
    with pytest.raises(SystemExit, match=r"the reward 'thrifty' does not explain its option 'power'; add"):
        list(make_config_reference.choice_options("reward", "thrifty", GROUPS["reward"].node("thrifty")))


def test_configuration_reference_is_current(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_config_reference, "reference", lambda: reference)
    monkeypatch.setattr(sys, "argv", ["make_config_reference.py", "--check"])
    assert make_config_reference.main() == 0, "run python scripts/make_config_reference.py"


def test_the_configuration_reference_explains_every_option(reference: str) -> None:
    rows = [line for line in reference.splitlines() if line.startswith("| `")]
    options = set()
    for line in rows:
        name, kind, default, explanation = re.split(r"(?<!\\)\|", line)[1:-1]
        assert all(part.strip(" `") for part in (name, kind, default, explanation)), line
        options.add(name.strip(" `"))
    store_groups()
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        config: Any = OmegaConf.to_container(hydra.compose("config", ["dataset=npz", "tracking=wandb"]))
    missing = {name for name in _dotted(config) if name not in options}
    named = {
        "model.architecture",
        *(f"{group}.name" for group in ("dataset", "selector", "reward", "pruner")),
    }
    assert missing == named


def _dotted(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in ("options", "rates"):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_explanations_are_read_from_docstrings() -> None:
    def owner(first: int, second: int) -> None:
        """Do it.

        Args:
            first: What
                it is.
            second: Half: a colon.

        Raises:
            third: No option.
        """

    assert make_config_reference.explanations(owner) == {"first": "What it is.", "second": "Half: a colon."}
    assert make_config_reference.summary(owner) == "Do it."
