"""The command line answers what needs no computing before torch is imported, and imports are light."""

import json
import subprocess
import sys
from typing import Any

import pytest

from decomposition import list_formats, list_heuristics
from rankrl.cli.config.schema import GROUPS, ON_FILE, TASKS, AppConfig, formats, plain, task_function
from rankrl.onnx.runtimes import list_runtimes
from rankrl.options.decomposition import AUTO_FORMATS, FILE_FORMATS
from rankrl.options.names import FORMATS, HEURISTICS
from rankrl.options.timing import RUNTIMES

HEAVY = ("torch", "sklearn", "scipy", "stable_baselines3", "torchvision", "onnx", "onnxruntime", "matplotlib")
COMMANDS = """
import contextlib, io, json, os, sys
from rankrl.cli.app import main
for arguments, environment in json.loads(sys.argv[1]):
    os.environ.update(environment)
    sys.argv[1:] = arguments
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            main()
            code = 0
        except SystemExit as stopped:
            code = stopped.code or 0
    print(json.dumps({"code": code, "said": out.getvalue(), "modules": list(sys.modules)}))
"""
ANSWERED = {
    "--help": (0, "Tasks (task=NAME)"),
    "--version": (0, "rankrl "),
    "--cfg job": (0, "task: pipeline"),
    "serch.episodes=3": (2, "Did you mean 'search.episodes'?"),
    "selector=ddgp": (2, "Did you mean 'ddpg'?"),
    "search.episodes=few": (2, "search.episodes must be a whole number"),
    "selector=bayes selector.candidats=1": (2, "Did you mean 'selector.candidates'?"),
    "export.runtimes=[opnvino]": (2, "Did you mean 'openvino'?"),
    "task=pipline": (2, "Did you mean 'pipeline'?"),
    "-sc query=bash": (0, "selector=bayes"),
    "task=evaluate weights=. hydra.run.dir=run": (2, "weights=. is a folder; give weights=model.safetensors"),
    "task=apply plan=. hydra.run.dir=run": (2, "plan=. is a folder; give plan=plan.json"),
    "task=evaluate model.checkpoint=none.th hydra.run.dir=run": (
        2,
        "cannot be read: there is no file none.th; check the path",
    ),
}


def run(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one process answers to every command, and what it has imported by then."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "model.safetensors").touch()
    completed = {"COMP_LINE": "rankrl selector=bay", "COMP_POINT": "19"}
    given = [(command.split(), completed if "-sc" in command else {}) for command in ANSWERED]
    done = run(COMMANDS, json.dumps(given), cwd=folder)
    assert not done.returncode, done.stderr
    found = dict(zip(ANSWERED, map(json.loads, done.stdout.splitlines()), strict=True))
    return {**found, "left": {"files": [path.name for path in folder.iterdir()]}}


@pytest.mark.parametrize("command", ANSWERED)
def test_the_command_line_answers_without_torch(command: str, answers: dict[str, dict[str, Any]]) -> None:
    answer = answers[command]
    code, said = ANSWERED[command]
    assert answer["code"] == code
    assert said in answer["said"]
    assert "rankrl.cli.app" in answer["modules"]
    assert not set(answer["modules"]).intersection(HEAVY)


def test_what_is_refused_without_torch_leaves_no_folder(answers: dict[str, dict[str, Any]]) -> None:
    assert answers["left"]["files"] == ["model.safetensors"]


def test_the_package_runs_as_the_command_does() -> None:
    command = [sys.executable, "-m", "rankrl", "task=pipline"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'pipeline'" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_may_be_read_in_part() -> None:
    command = [sys.executable, "-c", "from rankrl.cli.app import main; main()", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")


def test_importing_packages_imports_nothing_of_them_yet() -> None:
    done = run("import sys, decomposition, rankrl; print(*sys.modules, sep='\\n')")
    assert not done.returncode, done.stderr
    assert not set(done.stdout.split()).intersection(HEAVY)


def test_packages_import_no_compiler_and_offer_what_their_listings_name() -> None:
    code = """
import sys, optim, pruning, decomposition, gymnasium
print(*sys.modules, sep="\\n")
print("before", decomposition.list_operations())
import rankrl, rankrl.bench
print("after", decomposition.list_operations())
print(gymnasium.spec("rankrl/RankSelection-v0").id)
for package in (decomposition, rankrl, rankrl.bench):
    print(package.__name__, all(hasattr(package, name) for name in package.__all__), len(package.__all__) > 2)
"""
    done = run(code)
    assert not done.returncode, done.stderr
    lines = set(done.stdout.splitlines())
    assert not lines.intersection({"torch._dynamo", "torch._inductor", "sympy", "scipy", "onnxruntime"})
    assert lines > {
        "before ['factorise', 'quantise']",
        "after ['factorise', 'keep_channels', 'quantise', 'remove_block']",
    }
    assert lines > {"rankrl/RankSelection-v0", "decomposition True True", "rankrl True True"}
    assert "rankrl.bench True True" in lines


@pytest.mark.parametrize("group", GROUPS)
def test_the_tables_say_what_the_implementations_do(group: str) -> None:
    """Each choice of ours has an implementation that takes the same options with the same defaults."""
    for choice in GROUPS[group].ours:
        live = GROUPS[group].live(choice)
        assert GROUPS[group].types(choice) == {name: kind for name, (kind, _) in live.items()}, choice
        node = {"options": {}, **GROUPS[group].node(choice)}
        held = node["options"] if GROUPS[group].nested else {**node}
        known = {} if GROUPS[group].added else {name: plain(each) for name, (_, each) in live.items()}
        assert {name: held[name] for name in known} == known


def test_the_tables_name_every_runtime() -> None:
    assert sorted(RUNTIMES) == list_runtimes()


def test_formats_and_heuristics_are_listed_before_torch_is_imported() -> None:
    assert list(FORMATS) == formats() == list_formats()
    assert list(HEURISTICS) == list_heuristics()
    assert {*AUTO_FORMATS, *FILE_FORMATS} <= {*FORMATS}


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_its_function(task: str) -> None:
    model = {"architecture": "resnet20"}, {"architecture": "onnx"}
    for each in model if task in ON_FILE else model[:1]:
        assert callable(task_function(AppConfig(task=task, model=each)))
