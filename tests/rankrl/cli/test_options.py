"""What the command line says arrives in the workflow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from command_line import settings

from rankrl.cli.config import options
from rankrl.errors import ConfigError
from rankrl.models import build_model


def test_a_budget_in_time_is_measured_as_the_export_is() -> None:
    found = options.search_goal(settings("budget.latency=0.6", "export.batch=8", "export.threads=2"))
    assert found.budget.latency == 0.6
    assert (found.timing.batch, found.timing.threads) == (8, 2)
    assert found.counted["params"] is None


def test_without_a_budget_accuracy_keeps_a_share_of_the_parameters() -> None:
    assert options.search_goal(settings()).counted["params"] == 0.4
    assert options.search_goal(settings("reward=amc")).counted["params"] is None


IN_FILE = ("model=onnx", "model.path=a.onnx", "dataset.path=b.npz", "selector=bayes")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ("refitted", "soft_agreement", 1)),
        (("budget.latency=0.5",), ("refitted", "soft_agreement", 1)),
        (("search.metric=accuracy", "search.finalists=3"), ("refitted", "accuracy", 3)),
        (("search.statistics=corrected",), ("corrected", "accuracy", 5)),
        (("decomposition.channels=[0.5]",), ("corrected", "accuracy", 5)),
        (("decomposition.blocks=true", "budget.macs=0.5"), ("corrected", "accuracy", 5)),
        (IN_FILE, ("corrected", "soft_agreement", 5)),
    ],
)
def test_scores_see_the_refit_where_they_can_and_finalists_are_refitted_elsewhere(
    overrides: tuple[str, ...], expected: tuple[str, str, int]
) -> None:
    config = settings(*overrides)
    search = options.search_goal(config).search
    assert (search.statistics, search.metric, search.finalists) == expected
    assert search.episodes == 50
    assert (config.selector["name"], config.selector["policy"]) == ("bayes", "auto")


@pytest.mark.parametrize("name", ["params", "macs", "bytes", "latency"])
@pytest.mark.parametrize("value", ["0", "1.5", "-0.2"])
def test_budgets_outside_the_range_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"budget\.{name}=.* is outside \(0, 1\]"):
        options.search_goal(settings(f"budget.{name}={value}"))


def test_a_search_keeps_two_budgets_at_most() -> None:
    found = options.search_goal(settings("budget.bytes=0.3"))
    assert (found.budget.bytes, found.counted["params"]) == (0.3, None)
    found = options.search_goal(settings("budget.latency=0.5", "budget.bytes=0.3"))
    assert (found.budget.bytes, found.budget.latency) == (0.3, 0.5)
    with pytest.raises(
        ConfigError, match=r"budget\.params=0\.5, budget\.macs=0\.4 and budget\.bytes=0\.3 are all set"
    ):
        options.search_goal(settings("budget.params=0.5", "budget.macs=0.4", "budget.bytes=0.3"))


def test_layers_choose_among_the_formats_that_are_listed() -> None:
    assert options.candidate_options(settings()).formats == ("tensor_ring",)
    assert options.candidate_options(settings("decomposition=tucker")).formats == ("tucker",)
    auto = settings("decomposition=auto")
    assert options.candidate_options(auto).formats == ("cp", "tucker", "tensor_ring")
    assert auto.decomposition.format == "auto"
    few = settings("decomposition=auto", "decomposition.formats=[cp,tucker]")
    assert options.candidate_options(few).formats == ("cp", "tucker")


@pytest.mark.parametrize(
    ("overrides", "multiple"),
    [
        ((), 1),
        (("budget.latency=0.6",), 32),
        (("budget.latency=0.6", "decomposition.rank_multiple=4"), 4),
        (("decomposition.rank_multiple=16",), 16),
    ],
)
def test_ranks_for_a_budget_in_time_fill_the_processor_s_lanes(overrides, multiple, monkeypatch) -> None:
    monkeypatch.setattr(options, "suited_multiple", lambda timing: 32)
    assert options.candidate_options(settings(*overrides)).multiple == multiple


@pytest.mark.parametrize(
    ("overrides", "precisions"),
    [
        ((), ("float32",)),
        (("budget.latency=0.6", "decomposition.rank_multiple=8"), ("float32", "int8")),
        (("budget.bytes=0.2",), ("float32", "int8")),
        (("decomposition.precisions=[int8,int4_weights]",), ("int8", "int4_weights")),
        (("budget.latency=0.6", "export.reduce_range=true"), ("float32", "int7")),
    ],
)
def test_layers_choose_precisions_that_lower_what_the_budget_counts(
    overrides, precisions, monkeypatch
) -> None:
    monkeypatch.setattr("rankrl.onnx.export.static_quantiser.sums_overflow", lambda: False)
    assert options.candidate_options(settings(*overrides)).precisions == precisions


def test_precisions_that_are_none_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"decomposition\.precisions: there is no 'int9'; choose from float32"
    ):
        options.candidate_options(settings("decomposition.precisions=[int9]"))
    with pytest.raises(ConfigError, match=r"decomposition\.precisions is empty; choose from float32"):
        options.candidate_options(settings("decomposition.precisions=[]"))


def test_ranks_cannot_be_multiples_of_nothing() -> None:
    with pytest.raises(ConfigError, match=r"decomposition\.rank_multiple must be at least 1, got 0"):
        options.candidate_options(settings("decomposition.rank_multiple=0"))


def test_weighed_outputs_can_be_switched_off() -> None:
    assert options.candidate_options(settings()).weigh_outputs
    assert not options.candidate_options(settings("decomposition.weigh_outputs=false")).weigh_outputs


@pytest.mark.parametrize(
    ("overrides", "after_removal", "lr"),
    [
        ((), False, 1e-4),
        ((), True, 1e-3),
        (("optim.lr=2e-4",), True, 2e-4),
        (("optim=sgd",), True, 1e-2),
    ],
)
def test_fine_tuning_takes_larger_steps_after_a_removal(overrides, after_removal, lr) -> None:
    assert options.finetuning_recipe(settings(*overrides), after_removal=after_removal).lr == lr


@pytest.mark.parametrize(
    ("overrides", "shape", "lr"),
    [
        (("model=resnet20",), (1, 8, 8), 0.1),
        (("model=lenet5",), (1, 28, 28), 0.01),
        (("model=conv4",), (1, 8, 8), 0.05),
        (("model=torchvision", "model.name=resnet18"), (3, 32, 32), 0.1),
        (("model=torchvision", "model.name=squeezenet1_1"), (3, 32, 32), 0.01),
        (("model=custom", "model._target_=rankrl.models.zoo.LeNet5"), (1, 28, 28), 0.01),
        (("model=custom", "model._target_=rankrl.models.zoo.resnet20"), (1, 28, 28), 0.1),
        (("model=lenet5", "train.optim.lr=0.3"), (1, 28, 28), 0.3),
        (("model=lenet5", "train.optim.name=onnx_adam"), (1, 28, 28), 1e-3),
    ],
)
def test_training_from_scratch_takes_the_networks_own_rate(overrides, shape, lr) -> None:
    config = settings(*overrides)
    given = {key: value for key, value in config.model.items() if key not in ("architecture", "checkpoint")}
    network = build_model(config.model["architecture"], shape, 10, given)
    assert options.training_recipe(config, network).lr == lr


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}),
        (
            ("+train.optim.options.momentum=0.8",),
            {"momentum": 0.8, "nesterov": True, "weight_decay": 5e-4},
        ),
        (
            ("+train.optim.options.weight_decay=0.0",),
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0},
        ),
        (("train.optim.name=onnx_adam",), {}),
        (("train.optim.name=onnx_adagrad", "+train.optim.options.epsilon=1e-5"), {"epsilon": 1e-5}),
    ],
)
def test_training_from_scratch_gives_each_optimizer_options_of_its_own(overrides, expected) -> None:
    recipe = options.training_recipe(settings(*overrides), None)
    assert recipe.optimizer_options == expected
    options.check(settings("task=train", *overrides))


def test_other_optimizers_need_a_rate() -> None:
    with pytest.raises(ConfigError, match=r"the learning rate of sgd is null.*optim\.lr=0\.01"):
        options.finetuning_recipe(settings("optim=sgd", "~finetune.rates.sgd"))


def test_the_recipe_at_length_differs_from_the_short_one() -> None:
    short, full = (options.finetuning_recipe(settings(f"finetune={name}")) for name in ("short", "full"))
    assert options.finetuning_recipe(settings()) == short
    assert (short.product_decay, short.ema_decay) == (0.0, None)
    assert full.product_decay > 0
    assert full.ema_decay is not None
    assert full.epochs > short.epochs
    assert full.lr > short.lr
    assert full.distillation == short.distillation == 0.9


def test_the_recipe_for_what_lost_much_is_the_one_at_length_with_larger_steps() -> None:
    full, retrain = (options.finetuning_recipe(settings(f"finetune={name}")) for name in ("full", "retrain"))
    assert retrain.lr == 10 * full.lr
    assert replace(retrain, lr=full.lr) == full


@pytest.mark.parametrize(
    ("overrides", "new", "restored"),
    [((), True, True), ((), False, False), (("finetune.restore_best=true",), False, True)],
)
def test_images_that_the_network_was_trained_on_choose_no_epoch(overrides, new, restored) -> None:
    recipe = options.finetuning_recipe(settings(*overrides), heldout_is_new=new)
    assert recipe.restore_best is restored
