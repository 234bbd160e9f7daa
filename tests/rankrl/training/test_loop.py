"""Training learns, repeats from its seed, resumes bit for bit, and stops where it must."""

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from torch import nn

import optim
from decomposition import apply_plan, factorised_layers, make_plan
from optim import OnnxAdam
from rankrl.data import ImageData
from rankrl.device import Precision
from rankrl.errors import CheckpointError, ConfigError, ModelError, NonFiniteError
from rankrl.state_file import write_state
from rankrl.training import EpochRow, TrainingProgress, TrainingRecipe, list_schedules, train
from rankrl.training.accuracy import distillation_loss, training_loss
from rankrl.training.networks import write_training_step
from rankrl.training.recipe import WeightAverage, build_optimizer

MakeNetwork = Callable[[int], nn.Module]
OPTIMIZERS, SCHEDULES = optim.list_optimizers(), list_schedules()
FLOAT32 = Precision(torch.device("cpu"), torch.float32)

EVERYTHING = TrainingRecipe(
    epochs=3,
    batch_size=64,
    lr=5e-3,
    schedule="one_cycle",
    warmup=0.3,
    label_smoothing=0.1,
    gradient_clip=1.0,
    ema_decay=0.9,
    distillation=0.5,
    seed=3,
)
"""A recipe that uses every part of the loop."""


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def without_time(history: tuple[EpochRow, ...]) -> list[EpochRow]:
    return [dataclasses.replace(row, seconds=0.0) for row in history]


class KilledError(Exception):
    """Stands for a killed process."""


def kill_in_epoch(epoch: int) -> Callable[[TrainingProgress], None]:
    def stop(progress: TrainingProgress) -> None:
        if progress.epoch == epoch:
            raise KilledError

    return stop


@pytest.mark.parametrize("precision", [FLOAT32, Precision(torch.device("cpu"), torch.bfloat16)])
def test_training_learns_and_keeps_parameters_float32(
    digits: ImageData, make_network: MakeNetwork, precision: Precision
) -> None:
    model = make_network(0)
    result = train(model, digits, TrainingRecipe(epochs=6, lr=1e-2, batch_size=64), precision=precision)
    assert result.accuracy > 0.9
    assert result.accuracy == max(row.accuracy for row in result.history)
    assert result.history[-1].loss < result.history[0].loss / 2
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    assert all(value.is_contiguous() for value in model.state_dict().values())


@pytest.mark.parametrize(
    ("name", "schedule"),
    [  # each of both once by default
        pytest.param(
            name, schedule, marks=[] if row % len(SCHEDULES) == column % len(OPTIMIZERS) else pytest.mark.slow
        )
        for row, name in enumerate(OPTIMIZERS)
        for column, schedule in enumerate(SCHEDULES)
    ],
)
def test_every_optimizer_and_schedule_lowers_the_loss_and_resumes(
    digits: ImageData, make_network: MakeNetwork, tmp_path: Path, name: str, schedule: str
) -> None:
    recipe = TrainingRecipe(epochs=3, lr=1e-2, optimizer=name, schedule=schedule, batch_size=64)
    undisturbed = make_network(0)
    result = train(undisturbed, digits, recipe, precision=FLOAT32)
    assert result.history[-1].loss < result.history[0].loss
    assert_resumes(digits, make_network, tmp_path / "s.safetensors", recipe, undisturbed, result.history)


MOMENTUM = TrainingRecipe(
    epochs=3,
    batch_size=64,
    lr=0.05,
    optimizer="sgd",
    optimizer_options={"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
)
LAST_EPOCH = TrainingRecipe(epochs=3, batch_size=64, restore_best=False, augment=False)


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        *((recipe, torch.float32) for recipe in (EVERYTHING, MOMENTUM, LAST_EPOCH)),
        (EVERYTHING, torch.bfloat16),
        *(pytest.param(recipe, torch.bfloat16, marks=pytest.mark.slow) for recipe in (MOMENTUM, LAST_EPOCH)),
    ],
)
def test_a_killed_and_resumed_run_is_the_undisturbed_one_bit_for_bit(
    digits: ImageData, make_network: MakeNetwork, tmp_path: Path, recipe: TrainingRecipe, dtype: torch.dtype
) -> None:
    teacher = make_network(9) if recipe.distillation else None
    precision = Precision(torch.device("cpu"), dtype)
    undisturbed = make_network(0)
    result = train(undisturbed, digits, recipe, precision=precision, teacher=teacher)
    assert_resumes(
        digits,
        make_network,
        tmp_path / "state.safetensors",
        recipe,
        undisturbed,
        result.history,
        precision=precision,
        teacher=teacher,
    )


def test_a_training_does_not_go_on_with_another_teacher(
    digits: ImageData, make_network: MakeNetwork, tmp_path: Path
) -> None:
    taught = partial(
        train, data=digits, recipe=EVERYTHING, precision=FLOAT32, state_file=tmp_path / "s.safetensors"
    )
    with pytest.raises(KilledError):
        taught(make_network(0), teacher=make_network(9), on_step=kill_in_epoch(2))
    with pytest.raises(CheckpointError, match=r"teacher was '[0-9a-f]+', is now '[0-9a-f]+'"):
        taught(make_network(0), teacher=make_network(8), resume=True)


def assert_resumes(
    digits: ImageData,
    make_network: MakeNetwork,
    path: Path,
    recipe: TrainingRecipe,
    undisturbed: nn.Module,
    history: tuple[EpochRow, ...],
    **options: Any,
) -> None:
    """Kill a run in its last but one epoch; the resumed run must equal the undisturbed one."""
    options = {"precision": FLOAT32} | options
    with pytest.raises(KilledError):
        train(
            make_network(0),
            digits,
            recipe,
            state_file=path,
            on_step=kill_in_epoch(recipe.epochs - 1),
            **options,
        )
    resumed = make_network(5)  # other weights: everything must come from the file
    torch.manual_seed(123)
    result = train(resumed, digits, recipe, state_file=path, resume=True, **options)
    assert same(weights(resumed), weights(undisturbed))
    assert without_time(result.history) == without_time(history)
    # A finished run resumed once more is that run.
    again = train(finished := make_network(6), digits, recipe, state_file=path, resume=True, **options)
    assert same(weights(finished), weights(undisturbed))
    assert again == result


def test_equal_seeds_give_equal_weights_whatever_the_global_generator(
    digits: ImageData, make_network: MakeNetwork
) -> None:
    found = []
    for seed, global_seed in ((1, 10), (1, 20), (2, 10)):
        model = make_network(0)
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        train(model, digits, TrainingRecipe(epochs=1, seed=seed), precision=FLOAT32)
        assert torch.equal(torch.get_rng_state(), state)
        found.append(weights(model))
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


def test_without_augmentation_and_with_constant_rate_one_step_is_torchs_own(
    digits: ImageData, make_network: MakeNetwork
) -> None:
    # One batch of all images, plain SGD: order does not matter but for rounding.
    recipe = TrainingRecipe(
        epochs=1,
        batch_size=10**6,
        lr=0.1,
        optimizer="sgd",
        optimizer_options={"weight_decay": 0.01},
        schedule="constant",
        warmup=0.0,
        augment=False,
        restore_best=False,
    )
    model, oracle = make_network(0), make_network(0)
    model.get_submodule("dropout").p = oracle.get_submodule("dropout").p = 0.0  # type: ignore[assignment]
    train(model, digits, recipe, precision=FLOAT32)
    x = (digits.train.x.float() / 255 - digits.mean[0]) / digits.std[0]
    nn.functional.cross_entropy(oracle(x), digits.train.y).backward()
    with torch.no_grad():
        for parameter in oracle.parameters():
            decay = 0.01 * parameter if parameter.ndim > 1 else 0.0  # biases and BN are spared
            parameter -= 0.1 * (parameter.grad + decay)
    for key, value in oracle.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-4, atol=1e-5)


def test_decay_of_the_product_is_weight_decay_on_what_the_cores_contract_to(
    make_network: MakeNetwork, digits: ImageData
) -> None:
    dense = make_network(0)
    dense.get_submodule("dropout").p = 0.0  # type: ignore[assignment]
    model = apply_plan(dense, make_plan(dense, digits.input_shape, "tucker", 3))
    recipe = TrainingRecipe(
        epochs=1,
        batch_size=len(digits.train),
        lr=0.1,
        warmup=0.0,
        optimizer="sgd",
        optimizer_options={"weight_decay": 0.01},
        product_decay=0.3,
        augment=False,
        restore_best=False,
    )
    oracle = copy.deepcopy(model)
    layers = factorised_layers(oracle)
    assert layers
    for layer in layers.values():
        layer.balance()
    train(model, digits, recipe, precision=FLOAT32)
    x = (digits.train.x.float() / 255 - digits.mean[0]) / digits.std[0]
    oracle.train()
    loss = nn.functional.cross_entropy(oracle(x), digits.train.y)
    (loss + 0.15 * sum(layer.weight.square().sum() for layer in layers.values())).backward()
    cores = {id(parameter) for layer in layers.values() for parameter in layer.parameters()}
    with torch.no_grad():
        for parameter in oracle.parameters():
            plain = parameter.ndim > 1 and id(parameter) not in cores
            parameter -= 0.1 * (parameter.grad + (0.01 * parameter if plain else 0.0))
    for key, value in oracle.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "option"),
    [("sgd", "weight_decay"), ("onnx_adam", "norm_coefficient"), ("onnx_adagrad", "norm_coefficient")],
)
@pytest.mark.parametrize("decay_vectors", [False, True])
def test_weight_decay_spares_vectors_unless_told(
    make_network: MakeNetwork, name: str, option: str, decay_vectors: bool
) -> None:
    recipe = TrainingRecipe(optimizer=name, optimizer_options={option: 0.25}, decay_vectors=decay_vectors)
    optimizer = build_optimizer(make_network(0), recipe)
    decay = {p.ndim: group[option] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {1: 0.25 if decay_vectors else 0.0, 2: 0.25, 4: 0.25}


def test_frozen_parameters_stay(digits: ImageData, make_network: MakeNetwork) -> None:
    model = make_network(0)
    model.get_submodule("conv").requires_grad_(False)
    before = weights(model)
    train(model, digits, TrainingRecipe(epochs=1), precision=FLOAT32)
    assert torch.equal(model.state_dict()["conv.weight"], before["conv.weight"])
    assert not torch.equal(model.state_dict()["linear.weight"], before["linear.weight"])
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        train(model, digits, TrainingRecipe(epochs=1), precision=FLOAT32)


def test_the_best_epoch_is_returned_and_patience_ends_the_training(
    digits: ImageData, trained: nn.Module
) -> None:
    # A rate that is too high after a good start: accuracy soon stops rising.
    recipe = TrainingRecipe(
        epochs=40, lr=0.02, schedule="constant", warmup=0.0, batch_size=64, early_stop_patience=2
    )
    result = train(trained, digits, recipe, precision=FLOAT32)
    best = max(row.accuracy for row in result.history)
    first_best = next(row for row in result.history if row.accuracy == best)
    assert result.stopped_early
    assert len(result.history) == first_best.epoch + 2
    assert (result.epoch, result.accuracy) == (first_best.epoch, best)


@pytest.mark.parametrize("halvings", [0, 2])
def test_a_network_that_training_makes_worse_is_handed_back_as_it_was(
    digits: ImageData, trained: nn.Module, tmp_path: Path, halvings: int
) -> None:
    model = copy.deepcopy(trained)
    recipe = TrainingRecipe(
        epochs=2, lr=0.3, schedule="constant", warmup=0.0, batch_size=64, halvings=halvings
    )
    state = tmp_path / "state.safetensors"
    result = train(model, digits, recipe, precision=FLOAT32, state_file=state)
    assert max(row.accuracy for row in result.history) < result.start
    assert (result.epoch, result.accuracy) == (0, result.start)
    assert same(weights(model), weights(trained))
    # What was scored before a kill is not scored again.
    again = copy.deepcopy(trained)
    assert (
        train(again, digits, recipe, precision=FLOAT32, state_file=state, resume=True).start == result.start
    )
    assert same(weights(again), weights(trained))


def test_cores_are_sized_alike_before_the_first_step(digits: ImageData) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )
    model = apply_plan(dense, make_plan(dense, digits.input_shape, "cp", 4))
    (layer,) = (each for name, each in factorised_layers(model).items() if name == "0")
    with torch.no_grad():
        layer.set_cores(
            [core * factor for core, factor in zip(layer.cores(), (100.0, 0.1, 0.1), strict=True)]
        )
    weight = layer.weight.clone()
    recipe = TrainingRecipe(epochs=1, lr=1e-12, product_decay=1e-12, restore_best=False)
    train(model, digits, recipe, precision=FLOAT32)
    sizes = [float(core.detach().square().mean()) for core in layer.cores()]
    assert max(sizes) / min(sizes) == pytest.approx(1, rel=1e-3)
    assert torch.allclose(layer.weight, weight, atol=1e-4)


def test_the_teacher_is_followed_and_left_as_it_was(
    digits: ImageData, trained: nn.Module, make_network: MakeNetwork
) -> None:
    student, before = make_network(2), weights(trained)
    # Labels of one class only: all the student knows of the others it has from the teacher.
    unlabelled = dataclasses.replace(
        digits, train=dataclasses.replace(digits.train, y=torch.zeros_like(digits.train.y))
    )
    recipe = TrainingRecipe(epochs=4, lr=1e-2, batch_size=64, distillation=1.0, temperature=2.0)
    result = train(student, unlabelled, recipe, precision=FLOAT32, teacher=trained)
    assert result.accuracy > 0.85
    assert same(weights(trained), before)


def test_a_missing_teacher_is_an_error(digits: ImageData, make_network: MakeNetwork) -> None:
    model = make_network(0)
    for teacher in (None, model):
        with pytest.raises(ConfigError, match="needs a teacher"):
            train(model, digits, TrainingRecipe(distillation=0.5), teacher=teacher)


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_average_follows_weights_and_buffers_ever_more_slowly(decay: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 2).double())
    average = WeightAverage(model, decay)
    expected = weights(model)
    for updates in range(20):
        for value in model.state_dict().values():  # the tensors themselves
            value.copy_(torch.randn_like(value) if value.is_floating_point() else value + 7)
        average.update_parameters(model)
        share = 1 - min(decay, (1 + updates) / (10 + updates))
        for key, value in model.state_dict().items():
            follows = value.is_floating_point()
            expected[key] = expected[key].lerp(value, share) if follows else value.clone()
    assert same(weights(average.module), expected)
    assert expected["1.num_batches_tracked"] == 140
    assert not average.module.training
    assert not any(parameter.requires_grad for parameter in average.parameters())


def test_a_loss_that_diverges_names_epoch_step_and_rate(digits: ImageData, make_network: MakeNetwork) -> None:
    recipe = TrainingRecipe(
        epochs=2, lr=1e20, halvings=0, optimizer="sgd", schedule="constant", warmup=0.0, batch_size=64
    )
    with pytest.raises(NonFiniteError, match=r"in epoch 1, step \d+ of 17, at learning rate 1e\+20\. Lower"):
        train(make_network(0), digits, recipe, precision=FLOAT32)


def test_the_callback_sees_every_epoch_end_with_growing_steps(
    digits: ImageData, make_network: MakeNetwork
) -> None:
    seen: list[TrainingProgress] = []
    result = train(
        make_network(0),
        digits,
        TrainingRecipe(epochs=3, batch_size=16),
        precision=FLOAT32,
        on_step=seen.append,
    )
    assert [progress.step for progress in seen] == sorted({progress.step for progress in seen})
    assert {progress.steps for progress in seen} == {3 * 71}
    assert [seen[index].step for index in (-1, 0)] == [213, 25]
    assert seen[0].best_accuracy == result.start
    assert seen[-1].best_accuracy == max(row.accuracy for row in result.history)


def test_a_network_that_does_not_fit_is_refused(digits: ImageData) -> None:
    with pytest.raises(ModelError, match="10 classes"):
        train(nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), digits, TrainingRecipe())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adamw"}, "optimizer 'adamw'"),
        ({"optimizer_options": {"speed": 1}}, "optimizer 'onnx_adam'.*speed"),
        ({"optimizer": "sgd", "optimizer_options": {"momentum": -1.0}}, "optimizer 'sgd'.*momentum"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_refused(
    digits: ImageData, make_network: MakeNetwork, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(make_network(0), digits, TrainingRecipe(**options))


def test_resuming_from_what_does_not_fit_is_refused(
    digits: ImageData, make_network: MakeNetwork, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    recipe = TrainingRecipe(epochs=1)
    with pytest.raises(ConfigError, match="needs the state_file"):
        train(make_network(0), digits, recipe, resume=True)
    with pytest.raises(CheckpointError, match="there is no training state"):
        train(make_network(0), digits, recipe, state_file=path, resume=True)
    train(make_network(0), digits, recipe, state_file=path)
    with pytest.raises(CheckpointError, match=r"lr was 0\.001, is now 0\.5"):
        train(make_network(0), digits, dataclasses.replace(recipe, lr=0.5), state_file=path, resume=True)
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(CheckpointError, match="does not fit this network"):
        train(other, digits, recipe, state_file=path, resume=True)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="damaged"):
        train(make_network(0), digits, recipe, state_file=path, resume=True)
    write_state(path, {}, {"updates": 3}, version=2)  # of a former release
    with pytest.raises(CheckpointError, match=r"has the version 2, .* start without resuming"):
        train(make_network(0), digits, recipe, state_file=path, resume=True)


def test_the_state_folder_holds_one_whole_file_after_each_epoch(
    digits: ImageData, make_network: MakeNetwork, tmp_path: Path
) -> None:
    train(
        make_network(0), digits, TrainingRecipe(epochs=2), state_file=tmp_path / "run" / "state.safetensors"
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["state.safetensors"]


STUDENT = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.3, 3.0]])
TEACHER = torch.tensor([[2.0, -1.0, 0.0], [0.5, 0.2, 1.0]])
LABELS = torch.tensor([0, 2])


@given(temperature=st.floats(0.1, 20))
def test_distillation_is_the_definition_of_the_divergence(temperature: float) -> None:
    p, q = (torch.softmax(scores.double() / temperature, 1) for scores in (TEACHER, STUDENT))
    expected = temperature**2 * (p * (p / q).log()).sum(1).mean()
    assert distillation_loss(STUDENT, TEACHER, temperature).item() == pytest.approx(expected.item(), rel=1e-4)


def test_a_student_that_equals_its_teacher_has_no_distillation_loss() -> None:
    assert distillation_loss(TEACHER, TEACHER, 4.0).item() == pytest.approx(0, abs=1e-6)
    # Softmax does not see a constant added to all scores.
    assert distillation_loss(TEACHER + 5, TEACHER, 4.0).item() == pytest.approx(0, abs=1e-5)


@given(mixture=st.floats(0, 1), smoothing=st.floats(0, 0.5))
def test_the_loss_mixes_both_parts(mixture: float, smoothing: float) -> None:
    recipe = TrainingRecipe(label_smoothing=smoothing, distillation=mixture, temperature=2.0)
    loss = training_loss(STUDENT, LABELS, TEACHER, recipe)
    hard = F.cross_entropy(STUDENT, LABELS, label_smoothing=smoothing)
    soft = distillation_loss(STUDENT, TEACHER, 2.0)
    assert loss.item() == pytest.approx(((1 - mixture) * hard + mixture * soft).item(), rel=1e-5)


def test_half_precision_scores_are_summed_in_float32() -> None:
    recipe = TrainingRecipe(label_smoothing=0.1, distillation=0.5)
    loss = training_loss(STUDENT.bfloat16(), LABELS, TEACHER.bfloat16(), recipe)
    assert loss.dtype == torch.float32


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))
    return apply_plan(model, make_plan(model, (3, 6, 6), "tucker", ranks=2))


def test_the_file_does_what_the_optimizer_does(network: nn.Module, tmp_path: Path) -> None:
    recipe = TrainingRecipe(lr=1e-2, optimizer="onnx_adam")
    write_training_step(network, recipe, tmp_path / "step.onnx")
    model = onnx.load(tmp_path / "step.onnx")
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    network(torch.randn(8, 3, 6, 6)).square().mean().backward()
    optimizer = OnnxAdam(network.parameters(), lr=recipe.lr)
    feeds: dict[str, np.ndarray] = {}
    for entry in model.graph.input:
        name, _, role = entry.name.rpartition(".")
        if entry.name.startswith("R_"):
            feeds[entry.name] = np.array(recipe.lr)
        elif entry.name.startswith("T_"):
            feeds[entry.name] = np.array(optimizer.param_groups[0]["first_update_count"], dtype=np.int64)
        elif role == "X":
            feeds[entry.name] = before[name].numpy()
        elif role == "G":
            feeds[entry.name] = dict(network.named_parameters())[name].grad.numpy()
        else:
            feeds[entry.name] = np.zeros_like(before[name].numpy())
    names = [output.name for output in model.graph.output]
    results = dict(zip(names, ReferenceEvaluator(model).run(None, feeds), strict=True))
    optimizer.step()
    for name, parameter in network.named_parameters():
        np.testing.assert_allclose(results[f"{name}.X_new"], parameter.detach(), rtol=1e-5, atol=1e-7)


def test_an_optimizer_that_is_no_operator_is_refused(network: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"export\.training=true.*'sgd' is none"):
        write_training_step(network, TrainingRecipe(optimizer="sgd"), tmp_path / "step.onnx")
