"""Masks that learn: on data in which few channels say anything, the others close."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pruning import (
    ChannelMask,
    GroupLassoMask,
    HardConcreteMask,
    MaskedNetwork,
    MaskEpoch,
    MaskTrainingOptions,
    MaskTrainingResult,
    MaskTrainingState,
    PruningError,
    PushPull,
    StrengthController,
    train_masks,
)
from pruning.training import FULL_PHASE, adam, linear

INFORMATIVE = [1, 4]
MASKS: dict[str, Callable[[int], ChannelMask]] = {
    "group_lasso": GroupLassoMask,
    "hard_concrete": HardConcreteMask,
    "hard_concrete_alpha": partial(HardConcreteMask, parametrisation="alpha"),
    "hard_concrete_hard_sigmoid": partial(HardConcreteMask, penalty_function="hard_sigmoid"),
}
Batches = list[tuple[torch.Tensor, torch.Tensor]]


@cache
def batches(count: int = 24, seed: int = 0) -> Batches:
    """Images of six channels; the class shifts the brightness of two of them."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        labels = torch.randint(0, 4, (32,), generator=generator)
        images = torch.rand(32, 6, 4, 4, generator=generator)
        images[:, 1] += (labels % 2).float().view(-1, 1, 1)
        images[:, 4] += (labels // 2).float().view(-1, 1, 1)
        result.append((images, labels))
    return result


def network() -> nn.Module:
    """A copy of the network that all tests share; random numbers go on as after its training."""
    model, state = trained()
    torch.set_rng_state(state)
    return copy.deepcopy(model)


@cache
def trained() -> tuple[nn.Module, torch.Tensor]:
    """A first layer that hands the six channels on, and a head that has learned to read them."""
    torch.manual_seed(0)
    first = nn.Conv2d(6, 6, 1)
    first.weight.data = torch.eye(6).view(6, 6, 1, 1)
    first.bias.data.zero_()
    first.requires_grad_(False)
    model = nn.Sequential(first, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    optimizer = torch.optim.Adam(model[-1].parameters(), lr=0.05)
    for images, labels in batches() * 4:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model, torch.get_rng_state()


def accuracy(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        hits = [(model(images).argmax(1) == labels).float().mean() for images, labels in batches(8, seed=1)]
    return float(torch.stack(hits).mean())


def parameters(model: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in model.parameters()))


def masked_network(mask: str) -> MaskedNetwork:
    return MaskedNetwork(network(), batches(1)[0][0], MASKS[mask])


@pytest.mark.parametrize(
    ("mask", "unit_norm"),
    [
        *(("group_lasso", True), ("group_lasso", False), ("hard_concrete", True)),
        pytest.param("hard_concrete", False, marks=pytest.mark.slow),
        *(
            pytest.param(f"hard_concrete_{variant}", unit_norm, marks=pytest.mark.slow)
            for variant in ("alpha", "hard_sigmoid")
            for unit_norm in (True, False)
        ),
    ],
)
def test_the_uninformative_channels_close_and_the_others_stay(mask: str, unit_norm: bool) -> None:
    masked = masked_network(mask)
    before = accuracy(masked.folded())
    # Gates without noise find out in far fewer steps.
    epochs, count, rate = (6, 12, 0.08) if mask == "group_lasso" else (16, 24, 0.02)
    # An open gate costs less than the loss that an informative channel saves (log 2), and more than nothing.
    options = MaskTrainingOptions(epochs, settling_epochs=1, strength=0.3, l2=1e-3, unit_norm=unit_norm)
    # The head must unlearn the other channels as fast as their gates close.
    mask_rate = {"group_lasso": rate, "hard_concrete_alpha": 0.3}.get(mask, 0.1)
    train_masks(
        masked,
        batches(count),
        F.cross_entropy,
        options,
        network_optimizer=adam(rate),
        mask_optimizer=adam(mask_rate),
    )
    assert masked.kept_channels() == {"0": INFORMATIVE}
    smaller = masked.removed()
    assert parameters(smaller) < parameters(network()) / 2
    assert accuracy(smaller) > before - 0.02


@pytest.mark.parametrize(
    ("mask", "strength", "push_pull"),
    [
        *(("group_lasso", 1e-5, PushPull()), ("group_lasso", 1e-1, PushPull(2, 1))),
        *(("hard_concrete", 1e-5, PushPull()), ("hard_concrete", 1e-1, PushPull(2, 1))),
        ("hard_concrete_alpha", 1e-5, PushPull()),
        ("hard_concrete_hard_sigmoid", 1e-1, PushPull(2, 1)),
    ],
)
def test_a_target_is_reached_without_tuning_the_strength(
    mask: str, strength: float, push_pull: PushPull
) -> None:
    masked = masked_network(mask)
    options = MaskTrainingOptions(epochs=6, settling_epochs=2, strength=strength, push_pull=push_pull)
    result = train_masks(
        masked,
        batches(12 if mask == "group_lasso" else 24),
        F.cross_entropy,
        options,
        network_optimizer=adam(0.02),
        cost=parameters,
        target=0.6,
    )
    assert result.epochs[-1].cost_fraction <= 0.6
    assert parameters(masked.removed()) <= 0.6 * parameters(network())
    # Chance is 0.25. Gates without noise choose well in so few steps, sampled ones less so.
    assert accuracy(masked.removed()) > (0.95 if mask == "group_lasso" else 0.4)


def test_what_closes_all_at_once_is_opened_again_up_to_the_target() -> None:
    masked = masked_network("hard_concrete")
    options = MaskTrainingOptions(epochs=4, settling_epochs=1, strength=1e3, checks_per_epoch=1)
    result = train_masks(masked, batches(8), F.cross_entropy, options, cost=parameters, target=0.8)
    one_unit = (6 + 1 + 4) / parameters(network())
    assert 0.8 - one_unit < result.epochs[-1].cost_fraction <= 0.8
    masked.eval()
    images = batches(1)[0][0]
    torch.testing.assert_close(masked.removed()(images), masked(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("strength", "target"), [(0.1, 0.9), (0.0, None)])
def test_the_hard_limit_holds_beside_a_target_and_without_a_penalty(
    strength: float, target: float | None
) -> None:
    masked = masked_network("group_lasso")
    options = MaskTrainingOptions(epochs=1 if target is None else 2, strength=strength, limit=0.5)
    train_masks(masked, batches(4), F.cross_entropy, options, cost=parameters, target=target)
    assert len(masked.kept_channels()["0"]) <= 3


def test_the_masks_are_fixed_at_the_end_and_removed_networks_agree() -> None:
    masked = masked_network("hard_concrete")
    options = MaskTrainingOptions(epochs=2, settling_epochs=1, strength=0.1)
    train_masks(masked, batches(8), F.cross_entropy, options)
    assert not any(parameter.requires_grad for parameter in masked.mask_parameters())
    images = batches(1)[0][0]
    masked.eval()
    torch.testing.assert_close(masked.removed()(images), masked(images), atol=1e-5, rtol=1e-5)


def test_the_history_is_reported_epoch_by_epoch() -> None:
    masked, seen = masked_network("group_lasso"), list[MaskEpoch]()
    options = MaskTrainingOptions(epochs=2, settling_epochs=2)
    result = train_masks(masked, batches(4), F.cross_entropy, options, cost=parameters, on_epoch=seen.append)
    assert result.epochs == seen
    assert [epoch.epoch for epoch in seen] == [0, 1, 2, 3]
    assert [epoch.strength for epoch in seen] == [options.strength, 0.0, 0.0, 0.0]
    assert all(math.isfinite(epoch.loss) and epoch.cost_fraction == 1.0 for epoch in seen)


def test_the_quality_jump_of_fixing_the_masks_is_measured() -> None:
    masked = masked_network("hard_concrete")
    options = MaskTrainingOptions(epochs=6, strength=0.03)
    jump = train_masks(masked, batches(6), F.cross_entropy, options, evaluate=accuracy).jump
    assert jump is not None
    assert jump.fixed == pytest.approx(accuracy(masked.removed()))
    assert 0 <= jump.sampled <= 1
    assert 0 <= jump.deterministic <= 1


def test_the_temperature_is_annealed_linearly() -> None:
    masked = masked_network("hard_concrete")
    temperatures = []
    masked.register_forward_pre_hook(lambda module, inputs: temperatures.append(module.masks[0].temperature))
    options = MaskTrainingOptions(epochs=2, temperature=(0.4, 0.1))
    train_masks(masked, batches(4), F.cross_entropy, options)
    assert temperatures == pytest.approx([0.4 - 0.3 * step / 8 for step in range(8)])


def test_push_pull_moves_one_side_at_a_time() -> None:
    masked = masked_network("group_lasso")
    options = MaskTrainingOptions(epochs=1, push_pull=PushPull(3, 1), unit_norm=False)
    gates = masked.masks[0].weight.clone()
    train_masks(masked, batches(3), F.cross_entropy, options)
    assert torch.equal(masked.masks[0].weight, gates)


def test_the_weights_are_regularised_without_the_masks() -> None:
    norms = {}
    for l1, l2 in ((0.0, 0.0), (0.01, 0.0), (0.0, 0.01)):
        masked = masked_network("group_lasso")
        options = MaskTrainingOptions(epochs=2, strength=0.0, l1=l1, l2=l2, unit_norm=False)
        train_masks(masked, batches(8), F.cross_entropy, options)
        norms[l1, l2] = float(masked.network[-1].weight.detach().norm())
        assert masked.open_fraction() == 1
    assert norms[0.01, 0.0] < norms[0.0, 0.0] > norms[0.0, 0.01]


def test_diverging_training_is_an_error() -> None:
    masked = masked_network("group_lasso")
    masked.network[-1].weight.data.fill_(float("nan"))
    with pytest.raises(PruningError, match="the loss is nan in step 1; lower the learning rates"):
        train_masks(masked, batches(1), F.cross_entropy, MaskTrainingOptions(epochs=1, unit_norm=False))


def test_a_target_out_of_reach_is_an_error_before_any_training() -> None:
    masked, epochs = masked_network("group_lasso"), list[MaskEpoch]()
    with pytest.raises(PruningError, match=r"0.01 of the network's cannot be reached"):
        train_masks(
            masked,
            batches(2),
            F.cross_entropy,
            MaskTrainingOptions(epochs=1),
            cost=parameters,
            target=0.01,
            on_epoch=epochs.append,
        )
    assert not epochs


@pytest.mark.parametrize(("cost", "target"), [(None, 0.5), (parameters, 0.0), (parameters, 1.0)])
def test_targets_that_make_no_sense_are_refused(
    cost: Callable[[nn.Module], float] | None, target: float
) -> None:
    with pytest.raises(PruningError, match="target is a fraction"):
        train_masks(
            masked_network("group_lasso"),
            batches(1),
            F.cross_entropy,
            MaskTrainingOptions(),
            cost=cost,
            target=target,
        )


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 0},
        {"settling_epochs": -1},
        {"strength": -1.0},
        {"l2": math.nan},
        {"checks_per_epoch": 0},
        {"trap_threshold": math.nan},
        {"limit": 0.0},
        {"temperature": (0.0, 0.1)},
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PruningError, match=next(iter(options))):
        MaskTrainingOptions(**options)


def test_training_needs_batches() -> None:
    with pytest.raises(PruningError, match="no batches"):
        train_masks(masked_network("group_lasso"), [], F.cross_entropy, MaskTrainingOptions())


class SeededBatches:
    """The same batches in every epoch, with torch's generator seeded by the number of the epoch."""

    def __init__(self, finished: int = 0) -> None:
        self.epoch, self.batches = finished, batches(4)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.epoch += 1
        torch.manual_seed(self.epoch)
        return iter(self.batches)


def train_seeded(
    mask: str,
    target: float | None,
    finished: int = 0,
    start: MaskTrainingState | None = None,
    on_state: Callable[[MaskTrainingState], None] | None = None,
) -> tuple[MaskedNetwork, MaskTrainingResult]:
    masked = masked_network(mask)
    result = train_masks(
        masked,
        SeededBatches(finished),
        F.cross_entropy,
        MaskTrainingOptions(
            epochs=4,
            settling_epochs=2,
            strength=0.05,
            push_pull=PushPull() if target is None else PushPull(2, 1),  # no whole number of turns an epoch
        ),
        cost=parameters,
        target=target,
        evaluate=accuracy,
        start=start,
        on_state=on_state,
    )
    return masked, result


@cache
def undisturbed(
    mask: str, target: float | None
) -> tuple[MaskedNetwork, MaskTrainingResult, list[tuple[dict[str, torch.Tensor], str]]]:
    """A training that nobody interrupts: network, result and the state after each epoch."""
    states: list[tuple[dict[str, torch.Tensor], str]] = []

    def keep(state: MaskTrainingState) -> None:
        tensors = {key: value.detach().clone() for key, value in state.tensors.items()}
        states.append((tensors, json.dumps(state.values)))

    return *train_seeded(mask, target, on_state=keep), states


@pytest.mark.parametrize("target", [None, 0.6])
@pytest.mark.parametrize("finished", [1, 3, 5, 6])
@pytest.mark.parametrize("mask", ["group_lasso", "hard_concrete"])
def test_an_interrupted_training_goes_on_to_the_same_result(
    mask: str, finished: int, target: float | None
) -> None:
    whole, expected, states = undisturbed(mask, target)
    tensors, values = copy.deepcopy(states[finished - 1])
    start = MaskTrainingState(tensors, json.loads(values))
    continued, result = train_seeded(mask, target, finished, start)
    assert result == expected
    state = continued.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in whole.state_dict().items())
    assert continued.kept_channels() == whole.kept_channels()
    assert not any(parameter.requires_grad for parameter in continued.mask_parameters())


def test_a_state_of_another_network_is_refused() -> None:
    states = list[MaskTrainingState]()
    options = MaskTrainingOptions(epochs=2)
    train_masks(masked_network("group_lasso"), batches(2), F.cross_entropy, options, on_state=states.append)
    with pytest.raises(PruningError, match="another network"):
        train_masks(masked_network("hard_concrete"), batches(2), F.cross_entropy, options, start=states[0])


class FirstOf(list[tuple[torch.Tensor, torch.Tensor]]):
    """The first batch of an epoch of many."""

    def __init__(self, count: int) -> None:
        super().__init__(batches(1))
        self.count = count

    def __len__(self) -> int:
        return self.count


def test_short_trainings_move_the_masks_faster() -> None:
    speeds = {}
    for count in (10, FULL_PHASE, 2 * FULL_PHASE):
        masked = masked_network("hard_concrete")
        states = list[MaskTrainingState]()
        train_masks(
            masked, FirstOf(count), F.cross_entropy, MaskTrainingOptions(epochs=1), on_state=states.append
        )
        speeds[count] = states[0].values["mask_optimizer"]["groups"][0]["lr"]
    assert speeds[FULL_PHASE] == speeds[2 * FULL_PHASE] == HardConcreteMask(1).learning_rate
    assert speeds[10] == pytest.approx(FULL_PHASE / 10 * speeds[FULL_PHASE])


def test_forward_passes_run_in_the_context_that_is_given() -> None:
    seen = list[bool]()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu") and outputs.dtype == torch.bfloat16)
        return F.cross_entropy(outputs.float(), targets)

    train_masks(
        masked_network("group_lasso"),
        batches(2),
        loss,
        MaskTrainingOptions(epochs=1),
        autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )
    assert seen == [True, True]


def test_linear_goes_from_start_to_end_and_stays_there() -> None:
    assert [linear(2.0, 1.0, progress) for progress in (-1.0, 0.0, 0.5, 1.0, 2.0)] == [
        2.0,
        2.0,
        1.5,
        1.0,
        1.0,
    ]


def test_push_pull_alternates() -> None:
    turns = [PushPull(2, 1).turns(step) for step in range(6)]
    assert turns == [(True, False), (True, False), (False, True)] * 2
    assert PushPull().turns(5) == (True, True)


@pytest.mark.parametrize(("network", "masks"), [(1, 0), (0, 1), (-1, 1), (-1, -1)])
def test_push_pull_needs_both_sides(network: int, masks: int) -> None:
    with pytest.raises(PruningError, match="at least one step for each side"):
        PushPull(network, masks)


def test_the_strength_grows_above_the_line_and_shrinks_below_it() -> None:
    behind, ahead = StrengthController(1.0), StrengthController(1.0)
    assert behind.update(0.9, 0.5) > 1.0 > ahead.update(0.1, 0.5)


@pytest.mark.parametrize("sensitivity", [1.0, 10.0, 100.0, 1000.0])
def test_the_controller_brings_gates_of_any_sensitivity_to_the_line(sensitivity: float) -> None:
    controller, openness, steps = StrengthController(0.01), 1.0, 400
    for step in range(steps):
        strength = controller.update(openness, step / steps)
        openness = max(openness - sensitivity * strength / steps, 0.0)
        if step > steps // 2:
            assert openness == pytest.approx(1 - step / steps, abs=0.12)


def test_the_strength_stays_within_bounds() -> None:
    controller = StrengthController(1.0)
    for step in range(1, 200):
        assert 0.99e-4 <= controller.update(5.0, step / 10) <= 1.01e4


@pytest.mark.parametrize("strength", [0.0, -1.0, float("nan"), float("inf")])
def test_the_strength_must_be_positive(strength: float) -> None:
    with pytest.raises(PruningError, match="positive and finite"):
        StrengthController(strength)
