"""Which form of a compressed network is exported, by times that are made up here."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from decomposition import (
    LayerSpec,
    Quantise,
    build_structure,
    contracted,
    factorised_layers,
    make_plan,
)
from rankrl.timing import form
from rankrl.timing.form import faster_contracted, fastest_form
from rankrl.timing.latency import Latency, TimedTurns
from rankrl.timing.layer_latency import LayerTimer

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

    def export(self, network: nn.Module, path: Path, *_: Any, **__: Any) -> None:
        """Write how a network's layers are computed, and with what, where ONNX would take its time."""
        weights = [value.tolist() for value in network.state_dict().values()]
        path.write_text(json.dumps([executions(network), weights]))

    def turns(self, files: Sequence[tuple[str, Path]], **_: Any) -> TimedTurns:
        self.timed.append([path.stem for _, path in files])
        slow = {"staged": [], "mixed": self.slow, "contracted": NAMES}
        for _, path in files:
            written = [each == "dense" for each in json.loads(path.read_text())[0]]
            assert written == [name in slow[path.stem] for name in NAMES]
        each = [self.times[path.stem] for _, path in files]
        latencies = [Latency(value, value, value, 2, 1, 3, "processor") for value in each]
        return TimedTurns(latencies, np.tile(np.array(each), (3, 1)), None)

    def layers(self, *_: Any) -> list[str]:
        return self.slow


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def patch(slow: Sequence[str] = ("2",), **times: float) -> Made:
        made = Made(times, slow)
        monkeypatch.setattr(form, "export_onnx", made.export)
        monkeypatch.setattr(form, "time_in_turns", made.turns)
        monkeypatch.setattr(form, "faster_contracted", made.layers)
        return made

    return patch


def chosen(network: nn.Module, scratch: Path) -> tuple[nn.Module, str]:
    found, name, path = fastest_form(network, SHAPE, scratch, timing=TIMING, timed=None, channel_block=16)
    assert path is None or path == scratch / f"{name}.onnx"
    return found, name


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
    (kept,) = tmp_path.glob("form-*.json")
    assert json.loads(kept.read_text()) == [name, dense]
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
    for kept in tmp_path.glob("form-*.json"):
        kept.write_text("{", encoding="utf-8")
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


def test_layers_are_timed_in_both_forms_and_stay_as_they_are(
    network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, forms = [], LayerTimer.forms

    def noted(timer: LayerTimer, spec: LayerSpec, layers: Sequence[nn.Module]) -> np.ndarray:
        timed.append((spec.name, [layer.execution for layer in layers], forms(timer, spec, layers)))
        return timed[-1][-1]

    monkeypatch.setattr(LayerTimer, "forms", noted)
    model = nn.Sequential(*network[:4])  # the other layer is like the second
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = faster_contracted(model, SHAPE, TIMING, 16)
    assert [name for name, *_ in timed] == NAMES[:2]
    for _, executed, times in timed:
        assert (executed[0] != "dense", executed[1:]) == (True, ["dense"])
        assert times.shape == (2,)
        assert (times > 0).all()
    assert found == [name for name, _, (staged, one) in timed if one < 0.95 * staged]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
