"""A seeded sample of `scripts/fuzz_inputs.py`: damaged and hostile input is refused, and that is all."""

from pathlib import Path
from typing import Any

import fuzz_inputs
import fuzz_onnx
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

SEED = 13
EACH, FAST = 12, 2


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fuzz_inputs.make_good(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize(
    "number", [*range(FAST), *(pytest.param(n, marks=pytest.mark.slow) for n in range(FAST, EACH))]
)
@pytest.mark.parametrize("kind", fuzz_inputs.KINDS)
def test_no_input_does_more_than_be_refused(kind: str, number: int, good: Any, tmp_path: Path) -> None:
    outcome = fuzz_inputs.run_case(fuzz_inputs.make_case(kind, number, SEED, good, tmp_path / "case"))
    assert not outcome.problems, (outcome.case, outcome.message)


def test_cases_are_those_of_their_seed(good: Any, tmp_path: Path) -> None:
    def made(seed: int) -> list[Any]:
        cases = [fuzz_inputs.make_case("overrides", n, seed, good, tmp_path) for n in range(20)]
        return [case.arguments for case in cases]

    assert made(1) == made(1) != made(2)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("raise ValueError('a defect')", "traceback"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import sys; print('two', file=sys.stderr); raise SystemExit(2)", "0 paragraphs"),
        ("open('marker', 'w')", "CODE WAS RUN"),
        ("open('metrics.json', 'w'); raise SystemExit(2)", "looks finished"),
    ],
)
def test_the_script_sees_what_it_looks_for(
    good: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, problem: str
) -> None:
    monkeypatch.setattr(fuzz_inputs, "rankrl_main", lambda: exec(command))
    outcome = fuzz_inputs.run_case(fuzz_inputs.make_case("plans", 0, 0, good, tmp_path / "case"))
    assert problem in outcome.problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda graph: None, ""),
        (lambda graph: graph.initializer[0].CopyFrom(_turned(graph.initializer[0])), "SILENTLY WRONG"),
        (lambda graph: setattr(graph.node[0], "op_type", "Nothing"), "does not load"),
        (lambda graph: fuzz_onnx.rename(graph, "y", "output"), "instead of"),
    ],
)
def test_the_script_sees_files_that_compute_something_else(change: Any, problem: str, tmp_path: Path) -> None:
    model = fuzz_onnx.right_model()
    onnx.save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "inputs.npz", x=fuzz_onnx.right_inputs())
    change(model.graph)
    (tmp_path / "run").mkdir()
    onnx.save(model, tmp_path / "run" / "model.onnx")
    problems = fuzz_onnx.onnx_problems(tmp_path)
    assert problem in problems[0] if problem else problems == []


def _turned(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return numpy_helper.from_array(np.flip(numpy_helper.to_array(tensor), 0).copy(), tensor.name)


def test_the_table_counts_by_kind(good: Any, tmp_path: Path) -> None:
    case = fuzz_inputs.make_case("plans", 0, 0, good, tmp_path / "case")
    outcomes = [
        fuzz_inputs.Outcome(case, True, (), "", 0.1),
        fuzz_inputs.Outcome(case, False, (), "", 0.1),
        fuzz_inputs.Outcome(case, True, ("traceback",), "", 0.1),
    ]
    assert "| plans | 3 | 1 | 1 | 1 |" in fuzz_inputs.table(outcomes)
    assert "| all | 3 | 1 | 1 | 1 |" in fuzz_inputs.table(outcomes)
