"""Hydra's and OmegaConf's faults, flags and functions work or end in one paragraph that says what it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import refusal

from rankrl.cli import app
from rankrl.cli.config.overrides import COMPLETE_ERRORS

INSPECT = ("task=inspect", "model=conv4", "dataset=digits")


@pytest.mark.parametrize("others", [(), ("decomposition=tucker", "selector=greedy", "search.images=100")])
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("+reward=weighted", "reward is chosen twice"),
        ("+finetune=full", "finetune is chosen twice"),
        ("seed=${nosuch}", "seed: Interpolation key 'nosuch' not found"),
        ("seed=${oc.env:NOSUCH}", "seed: Environment variable 'NOSUCH' not found"),
        ("budget.params=${oc.decode:${oc.env:NOSUCH}}", "budget.params: Environment variable 'NOSUCH' not"),
        ("seed=${nosuch:3}", "seed: Unsupported interpolation type nosuch"),
        ("seed=${seed}", "seed: Recursive interpolation detected"),
        ("decomposition.nosuch=1", "the option 'decomposition.nosuch' is unknown"),
        ("~selector.name", "selector.name is missing; choose with selector=NAME"),
        ("~nosuch", "'nosuch' does not exist"),
        ("~decomposition=nosuch", "Could not delete 'decomposition=nosuch'"),
        ("+selector@foo=greedy", "Key 'foo' not in 'AppConfig'"),
        ("seed=${oc.decode:x", "A bracket, a brace or a quote in it is not closed"),
        ("model.checkpoint='a", "A bracket, a brace or a quote in it is not closed"),
        ("seed=${oc.decode:${oc.env:PATH}", "missing BRACE_CLOSE"),
        ("seed=range(a)", "mismatch type argument start"),
        ("seed=sum(1,2)", "Unknown function 'sum'"),
        ("hydra.nosuch=1", "To append to your config use +hydra.nosuch=1"),
        ("hydra.callbacks.mine._target_=A", "use +hydra.callbacks.mine._target_=A"),
        ("hydra=x", "No match in the defaults list"),
        ("hydra.job.chdir=true", "leave it out: whatever a run writes lies in hydra.run.dir"),
        ("hydra.job.env_copy=[NOSUCH]", "KeyError: 'NOSUCH'"),
    ],
)
def test_a_fault_is_named_whatever_else_is_given(others: tuple[str, ...], fault: str, expected: str) -> None:
    assert expected in refusal(fault, *others)


def test_a_value_that_a_later_one_replaces_is_resolved_all_the_same() -> None:
    assert "Environment variable 'NOSUCH' not found" in refusal("dataset=${oc.env:NOSUCH}", *INSPECT)


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ("budget.params=interval(0.4,0.6)", "write budget.params=A,B,C"),
        ("+hydra.sweeper.params={budget.params: 'interval(0.4,0.6)'}", "write budget.params=A,B,C"),
        ("hydra.sweeper.params={seed: '0,1'}", "use +hydra.sweeper.params="),
        ("hydra.sweeper.params=3", "Cannot assign int"),
        ("seed=range(0)", "stands for no value"),
        ("selector=glob(nosuch*)", "stands for no value"),
    ],
)
def test_what_no_job_can_be_made_of_is_refused_before_the_sweep(sweep: str, expected: str) -> None:
    assert expected in refusal("-m", "task=search", sweep)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("-m", "--cfg", "job", "seed=0,1"), "Only one of --run, --multirun, --cfg"),
        (("--resolve", *INSPECT), "--resolve flag can only be used in conjunction with --cfg"),
        (("--shell-completion",), "Expecting one subcommand"),
        (("--experimental-rerun", "nosuch.pickle"), "a pickle can hold any program and is not run"),
        (("hydra.job_logging.root.level=NOSUCH", "hydra.run.dir=x", *INSPECT), "Unknown level: 'NOSUCH'"),
        (("+hydra.callbacks.mine._target_=nosuch.A", *INSPECT), "No module named 'nosuch'"),
        (("-m", "hydra.sweeper._target_=nosuch.A", "seed=0,1", *INSPECT), "Invalid plugin 'nosuch.A'"),
    ],
)
def test_what_hydra_itself_refuses_is_one_paragraph(
    refused: Callable[..., str], arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused(*arguments)
    assert COMPLETE_ERRORS not in os.environ


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "+hydra.sweeper.params={seed: '0,1'}"),
        ("-m", "+hydra.sweeper.params.seed='0,1'"),
        ("-m", "model=glob(conv*)"),
        ("hydra/job_logging=disabled",),
        ("+hydra.callbacks.mine._target_=hydra.experimental.callbacks.LogJobReturnCallback",),
        ("calibration.images=${search.images}",),
        ("seed=${oc.decode:${oc.env:NOSUCH,3}}",),
    ],
)
def test_what_hydra_offers_is_taken(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    others = ("task=search", f"hydra.run.dir={tmp_path}", f"hydra.sweep.dir={tmp_path}")
    assert app.checked_arguments([*others, *arguments]) is not None


def test_a_defect_of_a_task_keeps_its_traceback(
    rankrl: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(app, "_run_task", broken)
    with pytest.raises(ZeroDivisionError):
        rankrl(*INSPECT)


def test_whoever_asks_for_complete_errors_gets_them(
    rankrl: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMPLETE_ERRORS, "1")
    with pytest.raises(ValueError, match="--resolve"):
        rankrl("--resolve", *INSPECT)
