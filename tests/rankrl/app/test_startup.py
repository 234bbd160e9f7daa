"""The command line answers what needs no computing before torch is imported, and imports are light."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankrl.config import catalogue
from rankrl.config.choices import check_catalogue
from rankrl.config.groups import GROUPS
from rankrl.errors import ConfigError

HEAVY = ("torch", "sklearn", "scipy", "stable_baselines3", "torchvision", "onnx", "onnxruntime", "matplotlib")
MAIN = """
import sys
from rankrl.app import main
try:
    main()
finally:
    print(*sys.modules, sep="\\n")
"""


def modules(code: str, *arguments: str, **environment: str) -> tuple[set[str], subprocess.CompletedProcess]:
    """Run code that prints the modules it has loaded at the end; return them and the process."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    return set(done.stdout.splitlines()), done


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--help",), 0, "Tasks (task=NAME)"),
        (("--version",), 0, "rankrl "),
        (("--cfg", "job"), 0, "task: pipeline"),
        (("serch.episodes=3",), 2, "Did you mean 'search.episodes'?"),
        (("selector=ddgp",), 2, "Did you mean 'ddpg'?"),
        (("search.episodes=few",), 2, "search.episodes must be a whole number"),
        (("selector=bayes", "selector.optimizm=1"), 2, "Did you mean 'selector.optimism'?"),
        (("task=pipline",), 2, "Did you mean 'pipeline'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_command_line_answers_without_torch(arguments: tuple[str, ...], code: int, said: str) -> None:
    loaded, done = modules(MAIN, *arguments)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "rankrl.app" in loaded
    assert not loaded.intersection(HEAVY)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("task=evaluate", "weights={}"), "weights={0} is a folder; give weights={0}/model.safetensors"),
        (("task=apply", "plan={}"), "plan={} is a folder; give a file, such as plan.json"),
        (
            ("task=evaluate", "model.checkpoint={}/none.th"),
            "cannot be read: there is no checkpoint file {}/none.th; check the path",
        ),
    ],
)
def test_files_that_are_not_there_are_refused_without_torch(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    (tmp_path / "model.safetensors").touch()
    run = tmp_path / "run"
    loaded, done = modules(MAIN, *(each.format(tmp_path) for each in options), f"hydra.run.dir={run}")
    assert said.format(tmp_path) in done.stderr
    assert done.returncode == 2
    assert not loaded.intersection(HEAVY)
    assert not run.exists()


@pytest.mark.parametrize(
    ("argument", "code", "said"), [("--version", 0, "rankrl "), ("task=pipline", 2, "'pipeline'")]
)
def test_the_package_runs_as_the_command_does(argument: str, code: int, said: str) -> None:
    command = [sys.executable, "-m", "rankrl", argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_help_may_be_read_in_part() -> None:
    command = [sys.executable, "-c", "from rankrl.app import main; main()", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")


def test_completion_answers_without_torch() -> None:
    loaded, done = modules(MAIN, "-sc", "query=bash", COMP_LINE="rankrl selector=bay", COMP_POINT="19")
    assert "selector=bayes selector=bayes_ddpg" in done.stdout
    assert not loaded.intersection(HEAVY)


def test_importing_packages_imports_nothing_of_them_yet() -> None:
    loaded, done = modules("import sys, decomposition, rankrl; print(*sys.modules, sep='\\n')")
    assert not done.returncode, done.stderr
    assert not loaded.intersection(HEAVY)


def test_packages_import_no_compiler_and_offer_what_their_listings_name() -> None:
    code = """
import sys, optim, pruning, decomposition, gymnasium
print(*sys.modules, sep="\\n")
print("before", decomposition.list_operations())
import rankrl, rankrl.agents
print("after", decomposition.list_operations())
print(gymnasium.spec("rankrl/RankSelection-v0").id)
for package in (decomposition, rankrl, rankrl.agents):
    print(package.__name__, all(hasattr(package, name) for name in package.__all__), len(package.__all__) > 2)
"""
    lines, done = modules(code)
    assert not done.returncode, done.stderr
    assert not lines.intersection({"torch._dynamo", "torch._inductor", "sympy", "scipy", "onnxruntime"})
    assert lines > {
        "before ['factorise', 'quantise']",
        "after ['factorise', 'keep_channels', 'quantise', 'remove_block']",
    }
    assert lines > {"rankrl/RankSelection-v0", "decomposition True True", "rankrl True True"}
    assert "rankrl.agents True True" in lines


def test_the_catalogue_knows_what_is_registered() -> None:
    check_catalogue()
    for name, group in GROUPS.items():
        assert [choice for choice in group.known() if choice in catalogue.GROUPS[name].known()] == list(
            catalogue.GROUPS[name].known()
        )


def test_a_run_with_an_old_catalogue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalogue.DEFAULTS, "rankrl.workflow.session:SearchOptions.episodes", 7)
    with pytest.raises(ConfigError, match=r"SearchOptions\.episodes.*make_config_reference"):
        check_catalogue()
