"""What holds for every registered network, and what is refused."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rankrl.errors import ConfigError, ModelError
from rankrl.models import (
    build_model,
    check_classifier,
    create_model,
    list_models,
    model_source,
    register_model,
)

OPTIONS: dict[str, dict[str, object]] = {
    "torchvision": {"name": "mobilenet_v3_small"},
    "custom": {"_target_": "torchvision.models.SqueezeNet", "version": "1_1"},
}
"""What the models need that cannot be built without options."""
# A network in an ONNX file is never built.
TORCH_MODELS = [name for name in list_models() if name != "onnx"]


def build(name: str, /, side: int = 32, channels: int = 3, classes: int = 7, **options: object) -> nn.Module:
    return create_model(
        name, input_shape=(channels, side, side), num_classes=classes, **(OPTIONS.get(name, {}) | options)
    )


@pytest.mark.parametrize("name", TORCH_MODELS)
def test_every_model_maps_images_to_class_scores_and_is_described(name: str) -> None:
    model = build(name)
    assert model.training
    assert model.eval()(torch.randn(3, 3, 32, 32)).shape == (3, 7)
    assert model_source(name).description


@pytest.mark.parametrize(
    "name",
    [  # the longer ones are the same blocks once more
        pytest.param(name, marks=[pytest.mark.slow] if name in ("resnet32", "resnet44", "resnet56") else [])
        for name in TORCH_MODELS
        if name not in OPTIONS
    ],
)
def test_own_models_can_be_traced_and_take_any_batch_size(name: str) -> None:
    model = build(name, side=16).eval()
    x = torch.randn(4, 3, 16, 16)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model, (x,), dynamic_shapes=((batch, None, None, None),)).module()
    symbolic = torch.fx.symbolic_trace(model)
    for images in (x, torch.randn(9, 3, 16, 16)):
        torch.testing.assert_close(exported(images), model(images))
        torch.testing.assert_close(symbolic(images), model(images))


@pytest.mark.parametrize("name", ["resnet20", "resnet32", "resnet44", "resnet56", "conv4"])
@pytest.mark.parametrize(("side", "channels"), [(8, 1), (9, 2)])
def test_small_and_odd_images_are_taken(name: str, side: int, channels: int) -> None:
    assert build(name, side, channels)(torch.randn(2, channels, side, side)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "channels", "side", "count"),
    [
        ("resnet20", 3, 32, 269_722),
        ("resnet32", 3, 32, 464_154),
        ("resnet44", 3, 32, 658_586),
        ("resnet56", 3, 32, 853_018),
        ("lenet5", 1, 28, 431_080),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, channels: int, side: int, count: int) -> None:
    model = build(name, side, channels, classes=10)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_resnet_keys_are_those_of_the_published_checkpoints() -> None:
    keys = set(build("resnet20").state_dict())
    blocks = {f"layer{stage}.{index}" for stage in (1, 2, 3) for index in range(3)}
    layers = {f"{block}.{layer}" for block in blocks for layer in ("conv1", "bn1", "conv2", "bn2")}
    assert {key.rpartition(".")[0] for key in keys} == layers | {"conv1", "bn1", "linear"}


def test_option_a_subsamples_and_pads_channels_equally() -> None:
    block = build("resnet20").get_submodule("layer2.0")
    x = torch.randn(2, 16, 5, 5)
    shortcut = block.get_submodule("shortcut")(x)
    assert torch.equal(shortcut[:, 8:24], x[:, :, ::2, ::2])
    assert not shortcut[:, :8].any()
    assert not shortcut[:, 24:].any()


def test_option_b_has_a_projection_where_the_shape_changes() -> None:
    keys = [key for key in build("resnet20", shortcut="B").state_dict() if "shortcut" in key]
    assert {key.split(".shortcut")[0] for key in keys} == {"layer2.0", "layer3.0"}


def test_layers_of_conv4_come_in_the_named_order() -> None:
    kinds = [type(module).__name__ for module in build("conv4").children() if not isinstance(module, nn.ReLU)]
    assert sorted(kinds) == sorted(
        ["Conv2d"] * 4 + ["MaxPool2d"] * 2 + ["Flatten", "Dropout"] + ["Linear"] * 2
    )
    order: list[str] = []
    model = build("conv4")
    for module in model.modules():
        if module is not model and not isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda module, *_: order.append(type(module).__name__))
    model(torch.randn(1, 3, 32, 32))
    pair = ["Conv2d", "Conv2d", "MaxPool2d"]
    assert order == [*pair, *pair, "Flatten", "Dropout", "Linear", "Linear"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lenet", {}, "Did you mean 'lenet5'"),
        ("resnet20", {"shortcut": "C"}, "must be one of A, B, got 'C'"),
        ("resnet20", {"width": 3}, "has no option 'width'; it has shortcut"),
        ("resnet20", {"shortcuts": "B"}, "Did you mean 'shortcut'"),
        ("torchvision", {"name": "resnet19"}, "resnet18"),
        ("torchvision", {"weights": "DEFAULT"}, "nothing is downloaded"),
        ("torchvision", {"name": "resnet18", "depth": 3}, "does not take the options"),
        ("custom", {"_target_": "nodots"}, "must be a dotted path"),
        ("custom", {"_target_": "no_such_package.module.build"}, "no module 'no_such_package'.*PYTHONPATH"),
        ("custom", {"_target_": "torchvision.models.no_such_model"}, "no callable 'no_such_model'"),
    ],
)
def test_unknown_names_and_options_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, **options)


@pytest.mark.parametrize("name", ["torchvision", "custom"])
def test_what_a_model_needs_must_be_given(name: str) -> None:
    with pytest.raises(ConfigError, match="needs model"):
        create_model(name, input_shape=(3, 32, 32), num_classes=10)


@pytest.mark.parametrize(
    ("name", "channels", "side", "message"),
    [
        ("lenet5", 1, 15, "at least 16x16 pixels, got 15x15"),
        ("conv4", 1, 3, "at least 4x4"),
        ("torchvision", 1, 32, "3 channels, the dataset's have 1"),
    ],
)
def test_images_that_do_not_fit_are_refused(name: str, channels: int, side: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(name, side, channels)


def test_without_torchvision_the_other_models_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    build("resnet20")
    with pytest.raises(ModelError, match="install both together"):
        build("torchvision")


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError, match=r"there is a model .* already"):
        register_model("resnet20", "again")(lambda input_shape, num_classes: nn.Identity())


class TwoOutputs(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda x: x, "not a torch.nn.Module"),
        (TwoOutputs(), "returns a tuple, but must return one tensor"),
        (nn.Flatten(), r"shape \(2, 48\) for 2 images.*10 classes"),
        (nn.Sequential(nn.Flatten(), nn.Linear(5, 10)), r"fails on images of shape \(3, 4, 4\)"),
    ],
)
def test_what_is_no_classifier_is_refused(model: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_classifier(model, (3, 4, 4), 10)


def test_the_check_leaves_the_network_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval(), nn.Flatten(), nn.Linear(16, 10))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    check_classifier(model, (3, 4, 4), 10)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model] == [True, False, True, True]


def test_a_users_own_function_is_called_with_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_networks.py").write_text(
        "from torch import nn\n"
        "def small(width):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(48, width), nn.Linear(width, 10))\n"
        "def shaped(input_shape, num_classes):\n"
        "    size = input_shape[0] * input_shape[1] * input_shape[2]\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(size, num_classes))\n"
        "def number():\n"
        "    return 3\n"
    )
    (tmp_path / "my_broken.py").write_text("import a_package_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = create_model(
        "custom", input_shape=(3, 4, 4), num_classes=10, _target_="my_networks.small", width=5
    )
    assert model(torch.zeros(2, 3, 4, 4)).shape == (2, 10)
    shaped = create_model("custom", input_shape=(1, 5, 6), num_classes=3, _target_="my_networks.shaped")
    assert shaped(torch.zeros(2, 1, 5, 6)).shape == (2, 3)
    with pytest.raises(ModelError, match="returned a int"):
        create_model("custom", input_shape=(3, 4, 4), num_classes=10, _target_="my_networks.number")
    with pytest.raises(ModelError, match=r"'a_package_that_is_not_installed' \(.*my_broken.py, line 1\)"):
        create_model("custom", input_shape=(3, 4, 4), num_classes=10, _target_="my_broken.build")
    with pytest.raises(ConfigError, match=r"no callable 'smal'\. Did you mean 'small'"):
        create_model("custom", input_shape=(3, 4, 4), num_classes=10, _target_="my_networks.smal")


def test_a_users_own_function_that_fails_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_failing.py").write_text(
        "def build(width, num_classes):\n    assert width > 8, 'too narrow'\n    return {}['x']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def build(**options: int) -> None:
        create_model("custom", input_shape=(3, 4, 4), num_classes=7, _target_="my_failing.build", **options)

    with pytest.raises(ModelError, match=r"too narrow \(.*my_failing.py, line 2\).*num_classes=7, width=3\)"):
        build(width=3)
    with pytest.raises(ModelError, match=r"KeyError: 'x' \(.*my_failing.py, line 3\)"):
        build(width=9)
    with pytest.raises(ModelError, match="unexpected keyword argument 'widht'"):
        build(widht=9)


@pytest.mark.parametrize("target", ["my_hidden.build", "torchvision.models.squeezenet1_1"])
def test_a_function_that_hides_num_classes_is_given_it_by_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    (tmp_path / "my_hidden.py").write_text(
        "from torch import nn\n"
        "def build(**options):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3072, options.get('num_classes', 1000)))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match=r"\+model.num_classes=10"):
        build_model("custom", (3, 32, 32), 10, {"_target_": target})
    network = build_model("custom", (3, 32, 32), 10, {"_target_": target, "num_classes": 10}).eval()
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_num_classes_is_no_option_of_other_models() -> None:
    for name, options in (("conv4", {}), ("torchvision", {"name": "resnet18"})):
        with pytest.raises(ConfigError, match="num_classes"):
            build_model(name, (3, 32, 32), 10, {**options, "num_classes": 10})
