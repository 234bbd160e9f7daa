"""Values of the wrong kind are refused before anything is made, and the message names the option in full."""

import json
import os
import shlex
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import check_overrides, refusal, task_refusal, values
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from rankrl.cli.config.checks import check_values
from rankrl.cli.config.compose import quoted, readable_arguments
from rankrl.errors import ConfigError

Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("dataset.heldout=0.5",), "dataset.heldout must be a whole number or null, got 0.5"),
        (("search.episodes=1.5",), "search.episodes must be a whole number, got 1.5"),
        (("model.checkpoint='\udc80'",), "is no valid text"),
    ],
)
def test_values_are_refused_before_anything_is_made(
    refused: Refused, tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused("task=evaluate", *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # Groups are chosen by name.
        (("dataset=true",), "dataset=true: dataset is the name of a choice"),
        (("selector=[[a]]",), "selector=[[a]]: selector is the name of a choice"),
        (("hydra/launcher=[7]",), "hydra/launcher=[7]: hydra/launcher is the name of a choice"),
        (("+search.__class__=1.5",), "the option 'search.__class__' is unknown"),
        (("optim.options.epsilon=1e-3",), "with a plus in front: '+optim.options={NAME: VALUE}'"),
        (("train.optim.options.momentum=0.8",), "'+train.optim.options={NAME: VALUE}'"),
        # Types of the schema, with a reason.
        (("budget.params=abc",), "budget.params must be a number or null, got 'abc'"),
        (("search.augmented=3",), "search.augmented must be true or false, got 3"),
        (("train.optim=null",), "train.optim holds options of its own"),
        (("search=3",), "search holds options of its own"),
        (
            ("compare.seeds=3",),
            "compare.seeds must be a list of whole numbers, got 3. Write compare.seeds=[3].",
        ),
        (("compare.selectors={a: 1}",), "compare.selectors: Cannot merge"),
        (("plan=true",), "plan must be text or null, got true"),
        (("seed=1000000000000000000000000",), "seed must be a whole number of at most 64 bits"),
        (("~search.episodes",), "search.episodes is missing"),
        (("pruner.strengths=[1]",), "pruner.strengths: Cannot merge DictConfig with ListConfig"),
        # Nothing may be NaN or infinite.
        (("budget.params=nan",), "budget.params must be finite, got nan"),
        (("search.seconds=inf",), "search.seconds must be finite, got inf"),
        (("selector=bayes", "selector.step=-inf"), "selector.step must be finite"),
        (("finetune.gradient_clip=inf",), "finetune.gradient_clip must be finite"),
        (("pruner.strengths={conv1: 2.0}",), "'+pruner.strengths={NAME: VALUE}'"),
        (("budget.macs=1e999",), "budget.macs must be finite"),
        # The nearest option is looked for in the group first.
        (("reward.compresion=0.3",), "Did you mean 'reward.compression' (reward=weighted)?"),
        (("reward=weighted", "reward.compresion=0.3"), "Did you mean 'reward.compression'?"),
        (("finetune.epoch=3",), "Did you mean 'finetune.epochs'?"),
        (("dataset.pth=3",), "Did you mean 'dataset.path' (dataset="),
        # What Hydra cannot take.
        (("model.checkpoint=" + "[" * 400 + "]" * 400,), "nested too deeply"),
        (("seed=${seed}",), "seed"),
    ],
)
def test_what_an_option_cannot_be_is_refused(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refusal("task=evaluate", *arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("~dataset",), "dataset.name is missing; choose with dataset=NAME"),
        (("~export",), "export is missing"),
        (("~reward.name",), "reward.name is missing"),
        (("selector.name=[ddpg]",), "selector.name must be one of"),
        (("+dataset.foo=3",), "dataset 'digits' has no option 'foo'"),
        (("model.checkpoint=true",), "model.checkpoint must be text or null, got true"),
        (("model.checkpoint=7",), "model.checkpoint must be text or null, got 7"),
        (("model.checkpoint=",), "model.checkpoint is empty"),
        (("model=resnet20", "model.shortcut=[A]"), "model.shortcut must be text"),
        (
            ("dataset.train_images={a: 1}",),
            "dataset.train_images must be a whole number or null, got {'a': 1}",
        ),
        (
            ("dataset=imagefolder", "dataset.path=x", "dataset.mean=0.5"),
            "dataset.mean must be a list of numbers",
        ),
        (("dataset=imagefolder", "dataset.path=3"), "dataset.path must be text, got 3"),
        (("+dataset.flip=3",), "dataset.flip must be true, false or null, got 3"),
        (
            ("selector=ddpg", "selector.hidden=1e308"),
            "selector.hidden must be a list of whole numbers, got 1e+308",
        ),
        (("selector=ddpg", "selector.hidden=[64,x]"), "selector.hidden must be a list of whole numbers"),
        (("selector=ddpg", "selector.features=[identity,plam]"), "selector.features must be a list of"),
        (("selector=ddpg", "selector.noise=true"), "selector.noise must be a number, got true"),
        (
            ("selector=ddpg", "selector.action=ranks"),
            "selector.action must be one of importance, rank, ratio or null",
        ),
        (("reward=weighted", "reward.compression=much"), "reward.compression must be a number, got 'much'"),
        (("reward=amc", "reward.measure=latency"), "reward.measure must be one of params, macs"),
        (("pruner.layers=conv1",), "pruner.layers must be a list"),
        (("pruner.scope=5", "pruner=magnitude"), "pruner.scope must be one of"),
        (("+optim.options.epsilon=small",), "optim.options.epsilon must be a number, got 'small'"),
        (("+optim.options.epsilom=1",), "optimizer 'onnx_adam' has no option 'epsilom'"),
        (("+train.optim.options.nesterov=2",), "train.optim.options.nesterov must be true or false, got 2"),
        (("tracking=mlflow", "tracking.options.experiment=2"), "tracking.options.experiment must be text"),
        (("seed=-1",), "seed must not be negative"),
        (("+pruner.strengths={conv1: nan}",), "pruner.strengths must be finite"),
        (("model=custom", "model._target_=a.b", "+model.width=nan"), "model.width must be finite"),
    ],
)
def test_types_are_those_of_what_takes_the_option(arguments: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_values(values("task=evaluate", *arguments))
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("selector=ddpg", "selector.noise=-1"), "selector.noise must be at least 0"),
        (("selector=ddpg", "selector.hidden=[0]"), "selector.hidden must hold numbers of units >= 1"),
        (("selector=local", "selector.step=-1"), "selector.step must be positive"),
        (("selector=tpe", "selector.plans_per_step=0"), "selector.plans_per_step must be at least 1"),
        (("reward=weighted", "reward.compression=2"), "reward.compression must lie in [0, 1]"),
    ],
)
def test_ranges_of_selector_and_reward_are_refused_before_any_training(
    tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in task_refusal("task=search", *arguments)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_each_job_of_a_sweep_is_checked_before_the_first_begins(refused: Refused, tmp_path: Path) -> None:
    message = refused("-m", "task=evaluate", "dataset.train_images=100,{a: 1}")
    assert "dataset.train_images must be a whole number or null, got {'a': 1}" in message
    assert "write all values out" in refusal("-m", "task=evaluate", "seed=range(0,3),-1")
    assert "seed must not be negative, got -1" in refusal("-m", "task=evaluate", "seed=0,1,-1")
    assert "or for more than 10000" in refusal("-m", "task=evaluate", "seed=range(0,1000000000)")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["1,2", "range(1,3)", "choice(1,2)"])
def test_a_sweep_needs_its_flag(tmp_path: Path, value: str) -> None:
    assert "--multirun" in refusal("task=evaluate", f"seed={value}")
    assert not list(tmp_path.iterdir())


def test_values_that_an_experiment_sweeps_over_are_checked(tmp_path: Path) -> None:
    message = refusal("experiment=cifar10_sweep", "hydra.sweeper.params.budget\\.params='0.5,many'")
    assert "many" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sweep", [False, True])
@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("/proc/x", "No such file or directory"),
        ("file/run", "Not a directory"),
        ("file", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("a/../b/" + ("y" * 200 + "/") * 25, "File name too long"),
    ],
)
def test_folders_that_cannot_be_made_are_refused(
    tmp_path: Path, folder: str, reason: str, sweep: bool
) -> None:
    (tmp_path / "file").write_text("in the way")
    option = "hydra.sweep.dir" if sweep else "hydra.run.dir"
    message = refusal(*(["-m"] if sweep else []), "task=evaluate", f"{option}={folder}")
    assert reason in message
    assert option in message
    assert "cannot be written" in message
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("run", [".", "run"])
def test_a_folder_without_permission_is_refused(refused: Refused, tmp_path: Path, run: str) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert "Permission denied" in refused("task=evaluate", f"hydra.run.dir={locked / run}")


@pytest.mark.parametrize("option", ["model.checkpoint", "plan", "weights", "resume", "runs"])
def test_names_that_are_too_long_for_a_file_are_refused(refused: Refused, option: str) -> None:
    task = {"plan": "apply", "weights": "finetune", "runs": "report"}.get(option, "evaluate")
    reasons = {"resume": refusal, "runs": refused}.get(option, task_refusal)
    assert "xxx" in reasons(f"task={task}", "model=conv4", f"{option}={'x' * 300}")


def test_a_checked_folder_is_left_as_it_was(rankrl: Callable[..., None], tmp_path: Path) -> None:
    rankrl("--cfg", "job", "hydra.run.dir=shown")
    assert not list(tmp_path.iterdir())


def test_a_value_that_only_a_job_meets_names_the_job(
    rankrl: Callable[..., None],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sweepers of other packages draw values that nobody can look at before."""
    monkeypatch.setattr("rankrl.cli.config.checks.check_command", lambda *_: [])
    with pytest.raises(SystemExit):
        rankrl("-m", "task=evaluate", "model=conv4", "dataset.heldout=no,never", "hydra.sweep.dir=sweep")
    errors = sorted(tmp_path.glob("sweep/*/error.json"))
    assert [path.parent.name for path in errors] == ["dataset.heldout-never", "dataset.heldout-no"]
    assert "dataset.heldout must be a whole number or null" in json.loads(errors[0].read_text())["error"]
    assert "Traceback" not in capfd.readouterr().err


TEXTS = st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1)
FILE_NAMES = st.text(st.sampled_from("abcü9=.-_#&;~/ éß@|"), min_size=1)


def values_of(argument: str) -> list[str]:
    """Return the values that Hydra reads in an override, each as a job of a sweep gets it."""
    parser = OverridesParser.create()
    override = parser.parse_override(argument)
    if not override.is_sweep_override():
        return [str(override.value())]
    values = override.sweep_string_iterator()
    return [str(parser.parse_override(f"{override.key_or_group}={value}").value()) for value in values]


@given(TEXTS)
def test_quoted_text_is_read_back_by_hydra(text: str) -> None:
    assert values_of(f"a.b={quoted(text)}") == [text]


@given(FILE_NAMES)
def test_file_names_are_read_as_they_are_typed(name: str) -> None:
    (argument,) = readable_arguments([f"model.checkpoint=runs/{name}x"])
    assert values_of(argument) == [f"runs/{name}x"]


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("model.checkpoint=epoch=3-val_loss=0.12.ckpt", ["epoch=3-val_loss=0.12.ckpt"]),
        ("model.checkpoint=a.pt,epoch=3.ckpt,jürgen.pt", ["a.pt", "epoch=3.ckpt", "jürgen.pt"]),
        ("hydra.run.dir=my runs/lr = 0.1", ["my runs/lr = 0.1"]),
        ("model.checkpoint=model (1).pt", ["model (1).pt"]),
        ("model.checkpoint=~/a.pt", [str(Path.home() / "a.pt")]),
        ("seed=1,2\r", ["1", "2"]),
        ("+model.note=a=b", ["a=b"]),
        (r"model.checkpoint=C:\runs\a.pt", [r"C:\runs\a.pt"]),
    ],
)
def test_what_is_typed_is_what_is_read(typed: str, read: list[str]) -> None:
    (argument,) = readable_arguments([typed])
    assert values_of(argument) == read


@pytest.mark.parametrize(
    "argument",
    [
        *("seed=1,2", "selector=glob(bayes*)", "seed=range(1,10)", "a={b: c=d}", "a=[b=c]", "a='b=c'"),
        *("a=choice(1,2", "a=[", "a=b=c,", "a=b=c,range(1,3)", "a=${b}=c", "~a=b=c", "nonsense"),
    ],
)
def test_what_has_a_meaning_of_its_own_is_left_to_hydra(argument: str) -> None:
    assert readable_arguments([argument]) == [argument]


def test_overrides_come_before_flags_whose_values_are_no_overrides() -> None:
    given_first = [
        "seed=1",
        "-m",
        "--config-dir",
        "runs/lr=0.1",
        "decomposition=cp",
        "--config-dir=a=b",
        "\r",
    ]
    assert readable_arguments(given_first) == [
        *("seed=1", "decomposition=cp"),
        *("-m", "--config-dir", "runs/lr=0.1", "--config-dir=a=b"),
    ]


def test_a_value_that_cannot_be_read_is_named_with_the_quotes_that_help() -> None:
    with pytest.raises(ConfigError, match=r"parsed at 'model\.checkpoint=a\[1\]=b\.pt'") as refused:
        check_overrides(["task=inspect", "model.checkpoint=a[1]=b.pt"])
    assert """ 'model.checkpoint='"'"'a[1]=b.pt'"'"'',""" in str(refused.value)
    check_overrides(["task=inspect", *shlex.split("\"model.checkpoint='a[1]=b.pt'\"")])
