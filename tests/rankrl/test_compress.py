"""`rankrl.compress`: the whole way in one call, for networks of any kind."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from call_options import grouped
from safetensors import SafetensorError
from several_inputs import LENGTH, WORDS, TextClassifier, TwoInputs
from torch import nn
from torch.nn import functional as F

import decomposition
import rankrl
from rankrl.data.sample import Sample
from rankrl.errors import ConfigError, DataError, ExportError, NonFiniteError, StorageError
from rankrl.report import conclusion
from rankrl.result import Compression
from rankrl.verify.measure import HeldoutScore

pytestmark = pytest.mark.usefixtures(
    "staged_files", "no_report"
)  # for all calls but that of the fixture `result`

TOKENS = torch.randint(1, WORDS, (60, LENGTH), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(1))
NUMBERS = torch.randn(60, 5, generator=torch.Generator().manual_seed(2))
CLASSES = (NUMBERS.sum(1) > 0).long() + (IMAGES.mean((1, 2, 3)) > 0).long()
LOADER = [
    ((image, number), label)
    for image, number, label in zip(IMAGES.split(20), NUMBERS.split(20), CLASSES.split(20), strict=True)
]
TARGETS = [((image, number), torch.zeros(20, 3)) for (image, number), _ in LOADER]
QUICK: dict[str, Any] = {"timing": rankrl.LatencyOptions(batch=4, runs=2), "candidates": 4, "progress": False}


def two() -> TwoInputs:
    torch.manual_seed(0)
    return TwoInputs()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compressed")


@pytest.fixture(scope="module")
def result(folder: Path) -> rankrl.ModuleCompression:
    """A network with two inputs, searched, fine-tuned on its labels, tested."""
    return rankrl.compress(
        two(),
        LOADER,
        folder,
        params=0.6,
        finetune=rankrl.TrainingRecipe(epochs=3, lr=3e-3, batch_size=16),
        test=LOADER[:1],
        selector="random",
        **grouped(episodes=3, **QUICK),
    )


def test_network_keeps_the_budget_and_the_file_computes_the_same(result: rankrl.ModuleCompression) -> None:
    assert isinstance(result, Compression)
    assert result.after["params"] <= 0.6 * result.before["params"]
    assert result.after["params"] == decomposition.count_parameters(result.model)
    assert result.before["params"] == decomposition.count_parameters(two())
    assert result.after["macs"] == decomposition.count_macs(result.model, (IMAGES, NUMBERS))
    assert not result.model.training
    session = onnxruntime.InferenceSession(result.path)
    (found,) = session.run(None, {"image": IMAGES.numpy(), "numbers": NUMBERS.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, result.model(IMAGES, NUMBERS), atol=1e-4)
    assert result.verified < 1e-4
    assert result.collapsed is None
    assert result.untouched.keys() | result.errors.keys() == {layer.name for layer in result.plan}


@pytest.mark.parametrize("selector", ["greedy", "energy"])
def test_a_rule_chooses_without_a_score(tmp_path: Path, selector: str) -> None:
    scored: list[int] = []

    def score(network: nn.Module) -> float:
        scored.append(decomposition.count_parameters(network))
        return 1.0

    options = {"params": 0.6, "selector": selector, "score": score, **QUICK}
    result = rankrl.compress(two(), LOADER, tmp_path, **grouped(**options))
    assert set(scored) == {result.before["params"], result.after["params"]}
    assert scored.count(result.after["params"]) == 1
    assert not (tmp_path / "episodes.csv").exists()
    assert "search" not in json.loads((tmp_path / "metrics.json").read_text())
    found = rankrl.search(two(), LOADER, score=score, **grouped(params=0.6, selector=selector, **QUICK))
    assert found.plan == result.plan
    assert [row.score for row in found.rows] == [1.0]


def test_folder_holds_what_a_run_of_the_command_line_does(
    result: rankrl.ModuleCompression, folder: Path
) -> None:
    names = {"plan.json", "model.safetensors", "model.onnx", "metrics.json", "report.html", "episodes.csv"}
    assert names <= {path.name for path in folder.iterdir()}
    assert decomposition.CompressionPlan.load(folder / "plan.json") == result.plan
    (noted,) = [each.value for each in onnx.load(result.path).metadata_props if each.key == "plan"]
    assert decomposition.CompressionPlan.from_json(noted) == result.plan
    loaded, plan = rankrl.load_compressed(result.dense, folder / "model.safetensors")
    assert plan == result.plan
    assert torch.equal(loaded.eval()(IMAGES, NUMBERS), result.model(IMAGES, NUMBERS))
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["compressed"]["score"] == result.compressed_score
    assert metrics["finetuned"]["score"] == result.score
    assert metrics["search"]["episodes"] == 3
    assert 0 < metrics["dense_int8"]["score"] <= 1
    assert metrics["dense_int8"]["latency_ratio"] > 0
    assert metrics["ratios"]["params"] == result.before["params"] / result.after["params"]
    page = (folder / "report.html").read_text()
    assert "TwoInputs" in page
    assert "Fine-tuned" in page
    assert "Dense, int8" in page


def test_labels_of_classes_make_the_score_an_accuracy(result: rankrl.ModuleCompression) -> None:
    held = Sample.read(LOADER, result.dense, "data").parted(0.2, 0)[1]
    assert len(held) == 12
    with torch.no_grad():
        inputs = decomposition.network.inputs.tensors_of(held.inputs)
        expected = float((result.model(*inputs).argmax(1) == held.labels).float().mean())
    assert result.score == pytest.approx(expected)
    assert result.score >= result.compressed_score  # the best epoch is kept, or none
    assert result.test is not None
    with torch.no_grad():
        tested = float((two().eval()(IMAGES[:20], NUMBERS[:20]).argmax(1) == CLASSES[:20]).float().mean())
    assert result.test["baseline"] == pytest.approx(tested)
    assert [row.epoch for row in result.epochs] == [1, 2, 3]


def test_agreement_is_that_of_the_files(result: rankrl.ModuleCompression) -> None:
    held = Sample.read(LOADER, result.dense, "data").parted(0.2, 0)[1]
    (found,) = HeldoutScore(result.dense, held).agreement(result.model)
    (output,) = result.outputs
    assert output.name == "output"
    assert output.error == pytest.approx(found.error, rel=1e-3)
    assert output.top1 == found.top1
    assert output.kind == found.kind == "classes"  # as the labels are, whatever the scores sum to
    assert output.score == found.score


def test_original_is_left_as_it_was(tmp_path: Path) -> None:
    model = two().train()
    before = copy.deepcopy(model.state_dict())
    rankrl.compress(model, LOADER, tmp_path, macs=0.7, finetune=1, **grouped(**QUICK))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_network_without_labels_learns_to_imitate_the_dense_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TextClassifier()
    recipe = rankrl.TrainingRecipe(epochs=6, lr=3e-3, batch_size=16)
    found = rankrl.compress(model, TOKENS, tmp_path, params=0.6, finetune=recipe, **grouped(**QUICK))
    assert found.baseline_score == 1
    assert found.epochs[-1].loss < 0.7 * found.epochs[0].loss
    assert found.score >= found.compressed_score


def test_users_function_loss_and_score_are_used(tmp_path: Path) -> None:
    given: list[nn.Module] = []

    def finetune(network: nn.Module) -> None:
        given.append(network)
        assert network.training
        assert decomposition.factorised_layers(network)
        with torch.no_grad():
            network.get_parameter("last.bias").fill_(3.0)

    def score(network: nn.Module) -> float:
        return float(network.get_parameter("last.bias").mean())

    found = rankrl.compress(
        two(), LOADER, tmp_path / "own", params=0.7, finetune=finetune, score=score, **grouped(**QUICK)
    )
    assert found.model is given[0]
    assert not found.model.training
    assert found.score == 3
    assert found.compressed_score < 1
    assert found.epochs == ()
    seen = []

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(labels.shape)
        return F.mse_loss(outputs, labels)

    rankrl.compress(two(), TARGETS, tmp_path / "loss", params=0.7, finetune=1, loss=loss, **grouped(**QUICK))
    assert seen == [(48, 3)]


@pytest.mark.parametrize(
    ("finetune", "times"), [(None, 1), pytest.param(lambda network: None, 2, marks=pytest.mark.slow)]
)
def test_network_that_is_left_as_it_was_fitted_is_scored_once(
    tmp_path: Path, finetune: Any, times: int
) -> None:
    seen = []

    def score(network: nn.Module) -> float:
        seen.append(bool(decomposition.factorised_layers(network)))
        return 0.5

    found = rankrl.compress(
        two(),
        LOADER,
        tmp_path,
        params=0.6,
        score=score,
        score_name="IoU",
        finetune=finetune,
        **grouped(**QUICK),
    )
    assert seen.count(True) == times
    assert found.score == found.compressed_score == 0.5
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["score_name"] == "IoU"
    assert "for an IoU of 50.00" in conclusion(metrics)
    agreements = metrics["compressed"]["agreement"], metrics["finetuned"]["agreement"]
    assert agreements[0] == pytest.approx(agreements[1], rel=1e-4)


@pytest.mark.parametrize(
    ("score", "name", "words"),
    [(None, "IoU", "score_name='IoU' names the function in score="), (len, " ", "score_name is empty")],
)
def test_a_name_without_a_score_is_refused(tmp_path: Path, score: Any, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rankrl.compress(two(), LOADER, tmp_path, params=0.6, score=score, score_name=name)


@pytest.mark.slow
def test_attention_is_decomposed_and_heldout_inputs_may_be_given(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    words, others = torch.randn(48, 6, 16), torch.randn(24, 6, 16)
    found = rankrl.compress(
        layer, words, tmp_path / "attention", params=0.6, heldout=others, **grouped(skip=["linear2"], **QUICK)
    )
    assert {"self_attn.q_proj", "self_attn.out_proj"} & set(decomposition.factorised_layers(found.model))
    assert "linear2" in found.untouched


SEEN: dict[str, torch.Tensor] = {}


class Odd(torch.nn.Module):
    """Takes any number of inputs, keeps features in places, and computes a weight at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 16, 3, padding=1))
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.last = nn.Conv2d(16, 4, 3)
        self.features: list[torch.Tensor] = []
        self.up.register_forward_hook(lambda module, inputs, output: SEEN.update(up=output))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.features = [self.normed(inputs[0]).relu()]
        return self.last(self.up(self.features[0]).relu()).mean((2, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap", [lambda odd: odd, lambda odd: nn.DataParallel(torch.compile(odd, backend="eager"))]
)
def test_networks_of_odd_kinds_are_loaded_into_their_own_class(tmp_path: Path, wrap: Any) -> None:
    torch.manual_seed(0)
    odd = Odd()
    odd(IMAGES)
    wrapped = wrap(odd)
    found = rankrl.compress(wrapped, IMAGES, tmp_path, params=0.6, **grouped(**QUICK))
    assert {"normed", "up.product"} & set(decomposition.factorised_layers(found.model))
    assert {each.kind for each in found.plan.preparation} == {"plain_weights", "plain_transposed"}
    assert found.verified < 1e-4
    loaded, plan = rankrl.load_compressed(Odd(), tmp_path / "model.safetensors")
    assert plan == found.plan
    torch.testing.assert_close(loaded.eval()(IMAGES), found.model(IMAGES), rtol=0, atol=0)
    torch.testing.assert_close(found.dense(IMAGES), odd(IMAGES))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int7", "int8_weights", "int4_weights"])
@pytest.mark.parametrize(("kind", "data"), [(TwoInputs, LOADER), (TextClassifier, TOKENS)])
def test_integers_are_stored_and_computed_with(
    tmp_path: Path, kind: type[nn.Module], data: Any, precision: str
) -> None:
    torch.manual_seed(0)
    found = rankrl.compress(kind(), data, tmp_path, bytes=0.6, **grouped(precisions=(precision,), **QUICK))
    assert found.after["bytes"] <= 0.6 * found.before["bytes"]
    assert found.plan.chosen(decomposition.Quantise)
    assert found.outputs[0].error < 0.3
    initializers = {t.name: t.data_type for t in onnx.load(found.path).graph.initializer}
    whole = {onnx.TensorProto.INT8, onnx.TensorProto.INT4}
    assert whole & set(initializers.values())


@pytest.mark.slow
def test_killed_call_goes_on_and_equals_the_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"params": 0.6, "selector": "random", "episodes": 4, **QUICK}
    whole = rankrl.compress(two(), LOADER, tmp_path / "whole", **grouped(**options))
    with monkeypatch.context() as patch:

        def killed(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("rankrl.module_compression.save_compressed", killed)
        with pytest.raises(KeyboardInterrupt):
            rankrl.compress(two(), LOADER, tmp_path / "killed", **grouped(**options))
    again = rankrl.compress(two(), LOADER, tmp_path / "killed", **grouped(**options))
    assert again.plan == whole.plan
    assert again.path.read_bytes() == whole.path.read_bytes()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"network": nn.Linear},
            ConfigError,
            "takes a torch.nn.Module or the path of an ONNX file, got a type",
        ),
        ({"params": None}, ConfigError, "give a budget"),
        ({"params": 1.5}, ConfigError, r"outside \(0, 1\]"),
        ({"macs": 0.5, "bytes": 0.5}, ConfigError, "at most two budgets"),
        ({"selector": "greddy"}, ConfigError, "Did you mean 'greedy'?"),
        ({"finetune": "long"}, ConfigError, "finetune is a str; give a number of epochs"),
        ({"finetune": 0}, ConfigError, "epochs must be a whole number >= 1"),
        ({"loss": F.mse_loss}, ConfigError, "loss= is for our own training"),
        ({"loss": F.mse_loss, "finetune": lambda network: None}, ConfigError, "leave loss= to your function"),
        ({"loss": F.mse_loss, "finetune": 1, "inputs": (IMAGES, NUMBERS)}, ConfigError, "loss= needs labels"),
        ({"inputs": TARGETS, "finetune": 1}, ConfigError, r"float32 of shape \(48, 3\).*give loss="),
        ({"heldout": 1.0}, ConfigError, "heldout is 1.0; it is a share"),
        ({"inputs": []}, DataError, "data holds no inputs"),
        ({"inputs": (IMAGES[:1], NUMBERS[:1])}, DataError, "too few to hold some out"),
        ({"inputs": [LOADER[0], LOADER[1][0]]}, DataError, "labels must be one tensor for each batch"),
        ({"params": 1e-4}, decomposition.DecompositionError, "the least is"),
        ({"only": ["head"]}, decomposition.DecompositionError, "only: no layer matches 'head'"),
        ({"score": lambda network: float("nan")}, NonFiniteError, "must return a finite number"),
        ({"decomposition": "tuckr"}, decomposition.DecompositionError, "Did you mean 'tucker'?"),
    ],
)
def test_what_cannot_work_is_refused_before_layers_are_fitted(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    def fit(*_: object) -> None:
        raise AssertionError("a layer was fitted")

    monkeypatch.setattr(decomposition.FitLibrary, "fit", fit)
    arguments = {
        "network": two(),
        "inputs": LOADER,
        "target": tmp_path / "run",
        "params": 0.6,
        **QUICK,
    } | change
    with pytest.raises(error, match=message):
        rankrl.compress(**grouped(**arguments))
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        rankrl.compress(two(), LOADER, tmp_path / "file", params=0.6, **grouped(**QUICK))


def test_a_full_disk_is_told_with_the_file_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("decomposition.plan.save.save_file", full)
    with pytest.raises(StorageError, match=r"cannot write .*model\.safetensors: .*that the disk has room"):
        rankrl.compress(two(), LOADER, tmp_path, params=0.6, **grouped(**QUICK))
    assert not (tmp_path / "model.safetensors").exists()


def test_file_that_computes_something_else_does_not_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(*_: object, **__: object) -> float:
        raise ExportError("it differs")

    monkeypatch.setattr("rankrl.verify.measure.verify_onnx", differs)
    with pytest.raises(ExportError, match="it differs"):
        rankrl.compress(two(), LOADER, tmp_path, params=0.6, **grouped(**QUICK))
    assert not (tmp_path / "model.onnx").exists()
    assert not (tmp_path / "metrics.json").exists()
