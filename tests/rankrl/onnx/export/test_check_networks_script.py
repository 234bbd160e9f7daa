"""Networks of others are right from the plan to the ONNX file, or refused; the whole list is the script's."""

import json
import subprocess
import sys
from pathlib import Path

import check_networks
import pytest
import torch

from decomposition import CompressionPlan, apply_plan, factorised_layers, make_plan

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "transformer_encoder",
        *(
            pytest.param(name, marks=() if name == "odd/bfloat16" else pytest.mark.slow)
            for name in check_networks.ODD_NETWORKS
        ),
        pytest.param("squeezenet1_1", marks=pytest.mark.slow),
        pytest.param("shufflenet_v2_x0_5", marks=pytest.mark.slow),
        pytest.param("mnasnet0_5", marks=pytest.mark.slow),
    ],
)
def test_a_network_comes_through_all_steps(name: str, tmp_path: Path) -> None:
    assert torch.backends.mha.get_fastpath_enabled()
    outcome = check_networks.check(name, tmp_path)
    assert outcome.refusal == ""
    assert 0.2 < outcome.kept <= check_networks.NETWORKS[name].kept
    assert outcome.loaded == 0
    assert outcome.onnx <= check_networks.TOLERANCE


def test_the_plan_of_the_encoder_reaches_its_layers() -> None:
    torch.manual_seed(0)
    model = check_networks.TransformerClassifier().eval()
    plan = check_networks.uniform_plan(model, check_networks.NETWORKS["transformer_encoder"])
    small = apply_plan(model, plan, check_networks.smooth_images(4, 32, 0), options=check_networks.OPTIONS)
    assert {f"encoder.layers.{n}.linear{m}" for n in range(3) for m in (1, 2)} <= set(
        factorised_layers(small)
    )


def test_a_refusal_is_a_row_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sequence_first() -> torch.nn.Module:
        model = check_networks.TransformerClassifier(24, 1)
        model.encoder.layers[0].self_attn.batch_first = False
        return model

    def by_hand(model: torch.nn.Module, chosen: check_networks.Network) -> CompressionPlan:
        return make_plan(model, (3, chosen.size, chosen.size), chosen.tensor_format, 2)

    monkeypatch.setitem(check_networks.NETWORKS, "odd", check_networks.Network(sequence_first, 32, "cp"))
    monkeypatch.setattr(check_networks, "uniform_plan", by_hand)
    outcome = check_networks.check("odd", tmp_path)
    assert "the model's output for one input changes with the other inputs" in outcome.refusal
    text = check_networks.table([{"network": "odd", "refusal": outcome.refusal}])
    assert text.splitlines()[-1].startswith("| odd | 32 | cp | the model's output for one input")


def test_each_network_has_a_process_and_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = check_networks.Outcome(1000, 0.5, 2.0, 300.0, 0.0, 2e-6)
    answers = iter(["noise\n" + json.dumps(vars(outcome)), None, subprocess.TimeoutExpired("x", 60)])

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command == [sys.executable, check_networks.__file__, "--one", "resnet18"]
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, int(answer is None), answer or "", "a\nKilled")

    monkeypatch.setattr(subprocess, "run", run)
    assert check_networks.check_apart("resnet18", 60) == outcome
    assert check_networks.check_apart("resnet18", 60).refusal == "FAILED: Killed"
    assert check_networks.check_apart("resnet18", 60).refusal == "not finished after 1 minutes"


def test_the_page_names_networks_with_settings_of_their_own() -> None:
    rows = [
        {"network": name, "refusal": "no"} for name in ("resnet18", "swin_v2_t", "timm/mobilenetv3_small_050")
    ]
    text = check_networks.report(rows)
    assert "timm/mobilenetv3_small_050 keeps 75%; swin_v2_t is fitted layer by layer" in text
    assert "resnet18 keeps" not in text
