"""Which form of a compressed network is exported, by times that are made up here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from decomposition import (
    Quantise,
    build_structure,
    contracted,
    factorised_layers,
    inspect_layers,
    make_plan,
)
from rankrl.export.latency import Latency, TimedTurns
from rankrl.export.layer_timing import LayerTimer
from rankrl.workflow import form
from rankrl.workflow.form import FORM_FILE, faster_contracted, fastest_form

SHAPE = (3, 8, 8)
TIMING = {"batch": 2, "threads": 1, "runs": 3}
NAMES = ["0", "2", "4"]


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for entering in (3, 8, 8):
        layers += [nn.Conv2d(entering, 8, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 5)).eval()
    small = build_structure(model, make_plan(model, SHAPE, "cp", dict.fromkeys(NAMES, 5)))
    for parameter in small.parameters():
        nn.init.normal_(parameter, std=0.3)
    return small.eval()


class Made:
    """Times that are given, file by file."""

    def __init__(self, times: dict[str, float], slow: Sequence[str]) -> None:
        self.times, self.slow, self.timed = times, list(slow), list[list[str]]()

    def turns(self, files: Sequence[tuple[str, Path]], **_: Any) -> TimedTurns:
        self.timed.append([path.stem for _, path in files])
        assert all(path.exists() for _, path in files)
        each = [self.times[path.stem] for _, path in files]
        latencies = [Latency(value, value, value, 2, 1, 3, "processor") for value in each]
        return TimedTurns(latencies, np.tile(np.array(each), (3, 1)), None)

    def layers(self, *_: Any) -> list[str]:
        return self.slow


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def patch(slow: Sequence[str] = ("2",), **times: float) -> Made:
        made = Made(times, slow)
        monkeypatch.setattr(form, "time_in_turns", made.turns)
        monkeypatch.setattr(form, "faster_contracted", made.layers)
        return made

    return patch


def chosen(network: nn.Module, scratch: Path) -> tuple[nn.Module, str]:
    return fastest_form(network, SHAPE, scratch, timing=TIMING, timed=None, channel_block=16)


def executions(network: nn.Module) -> list[str]:
    return [layer.execution for layer in factorised_layers(network).values()]


@pytest.mark.parametrize(
    ("times", "name", "dense"),
    [
        ({"staged": 1.0, "mixed": 0.8, "contracted": 0.9}, "mixed", ["2"]),
        ({"staged": 1.0, "mixed": 0.9, "contracted": 0.8}, "contracted", NAMES),
        ({"staged": 1.0, "mixed": 1.2, "contracted": 1.1}, "staged", []),
        ({"staged": 1.0, "mixed": 0.99, "contracted": 0.98}, "staged", []),  # within the noise
    ],
)
def test_the_fastest_file_counts(
    network: nn.Module, patched: Any, tmp_path: Path, times: dict[str, float], name: str, dense: list[str]
) -> None:
    made = patched(**times)
    found, said = chosen(network, tmp_path)
    assert said == name
    assert [each == "dense" for each in executions(found)] == [each in dense for each in NAMES]
    assert made.timed == [["staged", "mixed", "contracted"]]
    assert json.loads((tmp_path / FORM_FILE).read_text())["chosen"] == name
    x = torch.randn(2, *SHAPE)
    torch.testing.assert_close(found(x), network(x), rtol=1e-4, atol=1e-4)


def test_what_was_chosen_is_kept_for_the_same_network(
    network: nn.Module, patched: Any, tmp_path: Path
) -> None:
    patched(staged=1.0, mixed=0.5, contracted=0.9)
    first, _ = chosen(network, tmp_path)
    made = patched(staged=0.1, mixed=0.5, contracted=0.9)
    again, name = chosen(network, tmp_path)
    assert (name, made.timed) == ("mixed", [])
    assert executions(again) == executions(first)
    with torch.no_grad():
        next(iter(network.parameters())).add_(1.0)
    assert chosen(network, tmp_path)[1] == "staged"
    (tmp_path / FORM_FILE).write_text("{", encoding="utf-8")
    assert chosen(network, tmp_path)[1] == "staged"
    assert len(made.timed) == 2


@pytest.mark.parametrize("slow", [[], NAMES])
def test_no_mixture_where_all_layers_agree(
    network: nn.Module, patched: Any, tmp_path: Path, slow: list[str]
) -> None:
    made = patched(slow, staged=1.0, contracted=1.2)
    assert chosen(network, tmp_path)[1] == "staged"
    assert made.timed == [["staged", "contracted"]]


def test_dense_and_rounded_networks_have_one_form(network: nn.Module, patched: Any, tmp_path: Path) -> None:
    made = patched()
    dense = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()
    assert chosen(dense, tmp_path) == (dense, "dense")
    Quantise(activations="float32").round(network[7])
    assert chosen(network, tmp_path) == (network, "staged")
    assert made.timed == []


def test_named_layers_alone_are_contracted(network: nn.Module) -> None:
    part = contracted(network, only=["4"])
    assert executions(part) == [*executions(network)[:2], "dense"]
    x = torch.randn(2, *SHAPE)
    torch.testing.assert_close(part(x), network(x), rtol=1e-4, atol=1e-4)


def test_layers_are_timed_in_both_forms_and_stay_as_they_are(network: nn.Module, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in network.state_dict().items()}
    assert set(faster_contracted(network, SHAPE, TIMING, 16)) <= set(NAMES)
    spec = inspect_layers(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)), (8, 8, 8))[0]
    timer = LayerTimer(batch=2, threads=1, runs=2, folder=tmp_path, channel_block=16)
    times = timer.forms(spec, [network[2], contracted(network)[2]])
    assert times.shape == (2,)
    assert (times > 0).all()
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name
