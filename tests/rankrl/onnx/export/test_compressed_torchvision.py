"""Networks that nobody here wrote go through surgery, forward, save, load and ONNX."""

from pathlib import Path

import pytest
import torch
from torchvision import models

from decomposition import (
    Factorise,
    FitOptions,
    apply_plan,
    count_macs,
    count_parameters,
    factorised_layers,
    inspect_layers,
    load_compressed,
    make_plan,
    save_compressed,
)
from rankrl.onnx.export import export_onnx, verify_onnx

# The large classifiers of VGG take half a minute of eigenvalues each and show nothing new.
CASES = [
    ("resnet18", "tensor_ring", ()),
    ("vgg11_bn", "tucker", ("classifier.0", "classifier.3")),
    ("mobilenet_v2", "tucker", ()),
    ("densenet121", "cp", ()),
    ("googlenet", "tensor_train", ()),
    ("efficientnet_b0", "cp", ()),
    ("vit_b_16", "tensor_train", ()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor_format", "left_out"), CASES)
def test_torchvision_network_is_compressed(
    name: str, tensor_format: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    options = {"init_weights": True, "aux_logits": False} if name == "googlenet" else {}
    if name == "vit_b_16":
        options["image_size"] = 64
    build = getattr(models, name)
    model = build(weights=None, **options).eval()
    shape = (3, 64, 64)
    specs = inspect_layers(model, shape)
    ranks = {spec.name: 2 for spec in specs if spec.refusal is None and spec.name not in left_out}
    plan = make_plan(model, shape, tensor_format, ranks)
    small = apply_plan(model, plan, options=FitOptions(iterations=2))

    by_name = {spec.name: spec for spec in specs}
    saved = sum(by_name[layer.name].params - layer.cost(by_name[layer.name]).params for layer in plan)
    assert saved > 0
    assert count_parameters(small) == count_parameters(model) - saved
    assert count_macs(small, shape) < count_macs(model, shape)
    assert len(factorised_layers(small)) == len(plan.chosen(Factorise))
    grouped = [spec for spec in specs if spec.groups > 1]
    assert all("grouped" in (plan[spec.name].reason or "") for spec in grouped)

    images = torch.randn(2, *shape)
    with torch.no_grad():
        expected = small(images)
    save_compressed(small, plan, tmp_path / "small.safetensors")
    loaded, _ = load_compressed(build(weights=None, **options).eval(), tmp_path / "small.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), expected, rtol=0, atol=0)
    export_onnx(small, tmp_path / "small.onnx", shape)
    assert verify_onnx(small, tmp_path / "small.onnx", images) <= 1e-4 * max(1.0, float(expected.abs().max()))
