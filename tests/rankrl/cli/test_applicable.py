"""What a command sets and would not be looked at is refused, with the reason and what to do."""

from __future__ import annotations

import pytest
from command_line import values

from rankrl.cli.config.applicable import RULES, check_applicable
from rankrl.cli.config.overrides import check_overrides
from rankrl.errors import ConfigError

FILE = ("model=onnx", "model.path=net.onnx", "dataset.path=inputs.npz")
IDLE = [
    (
        "search.",
        ("task=train", "search.episodes=5"),
        r"search\.episodes=5 .* task=train searches for no plan",
    ),
    ("selector.", ("task=evaluate", "selector=greedy"), r"selector=greedy .* searches for no plan"),
    ("reward.", ("task=apply", "reward=amc"), r"reward=amc .* searches for no plan"),
    ("calibration.", ("task=train", "calibration.images=5"), r"images=5 .* fits no layers"),
    ("decomposition.", ("task=finetune", "decomposition=cp"), r"decomposition=cp .* fits no layers"),
    ("search.", ("task=prune", "search.episodes=9"), r"episodes=9 .* set prune\.decompose_params"),
    ("selector.", ("task=prune", "selector=bayes"), r"selector=bayes .* task=prune decomposes nothing"),
    ("reward.", ("task=prune", "reward=amc"), r"reward=amc .* set prune\.decompose_params"),
    ("decomposition.", ("task=prune", "decomposition=cp"), r"=cp .* set prune\.decompose_params"),
    ("finetune.", ("task=search", "finetune.epochs=3"), r"epochs=3 .* task=search fine-tunes nothing"),
    ("finetune.teacher_model", ("finetune.teacher_model=resnet56",), r"the dense network teaches"),
    (
        "finetune.teacher_options.",
        ("+finetune.teacher_options.width=8",),
        r"the dense network teaches; set finetune\.teacher=",
    ),
    (
        "finetune.teacher",
        ("finetune.teacher=a.pt", "finetune.distillation=0"),
        r"a\.pt .* learns from labels alone",
    ),
    ("optim.", ("task=search", "optim=sgd"), r"optim=sgd .* task=search fine-tunes nothing"),
    ("train.", ("task=evaluate", "train.epochs=3"), r"epochs=3 .* trains no dense network"),
    ("export.", ("task=evaluate", "export.preprocess=true"), r"preprocess=true .* neither exports"),
    (
        "export.runtimes",
        ("task=search", "export.runtimes=[openvino]"),
        r"runtimes=\['openvino'\] .* task=search writes no ONNX file",
    ),
    ("export.skip", ("task=export", "export.skip=true"), r"skip=true .* task=export has no ONNX file that"),
    ("train.", ("model.checkpoint=a.th", "train.epochs=3"), r"epochs=3 .* model\.checkpoint is set"),
    ("budget.", ("task=evaluate", "budget.params=0.4"), r"budget\.params=0\.4 has no effect: task=evaluate"),
    ("budget.bytes", ("task=prune", "budget.bytes=0.3"), r"bytes=0\.3 .* set budget\.params or budget\.macs"),
    (
        "budget.latency",
        ("task=prune", "prune.decompose_macs=0.5", "budget.latency=0.3"),
        r"latency=0\.3 .* removes channels to a fraction of the parameters or MACs; set budget\.params",
    ),
    ("timing.table", ("timing.table=a.json",), r"table=a\.json .* no budget in time; set budget\.latency"),
    ("pruner.", ("task=search", "pruner=magnitude"), r"pruner=magnitude has no effect: task=search"),
    ("prune.", ("prune.decompose_macs=0.5",), r"prune\.decompose_macs=0\.5 .* task=pipeline prunes nothing"),
    (
        "prune.finetune_epochs",
        ("task=prune", "prune.finetune_epochs=2"),
        r"finetune_epochs=2 .* decomposes nothing, .* set finetune\.epochs",
    ),
    ("compare.", ("task=search", "compare.seeds=[4]"), r"compare\.seeds=\[4\] .* choose task=compare"),
    ("pretrain.", ("task=search", "pretrain.plans=5"), r"plans=5 .* task=search trains no policy"),
    ("inspect.", ("inspect.errors=true",), r"errors=true .* task=pipeline lists no layers"),
    (
        "calibration.",
        ("task=inspect", "calibration.images=9"),
        r"images=9 .* without being fitted; .* set inspect\.errors=true",
    ),
    ("plan", ("task=pipeline", "plan=runs/a/plan.json"), r"plan=runs/a/plan\.json .* task=apply"),
    ("weights", ("task=apply", "weights=a.safetensors"), r"weights=a\.safetensors .* model\.checkpoint=PATH"),
    ("run", ("task=train", "run=runs/a"), r"run=runs/a .* task=finetune, evaluate"),
    ("runs", ("task=train", "runs=multirun/a"), r"runs=multirun/a .* task=report"),
    (
        "decomposition.formats",
        ("decomposition=tucker", "decomposition.formats=[cp,tucker]"),
        r"decomposition\.formats=.* choose decomposition=auto",
    ),
    (
        "decomposition.tensorised",
        ("decomposition=cp", "decomposition.tensorised=true"),
        r"decomposition\.tensorised=true .* decomposition=tensor_ring",
    ),
    (
        "search.refit_images",
        ("search.refit_images=50", "search.statistics=corrected"),
        r"refit_images=50 .* set search\.statistics=refitted",
    ),
    ("search.cluster", ("search.cluster=ray",), r"cluster=ray .* set search\.workers"),
    ("search.worker_cpus", ("search.worker_cpus=2",), r"worker_cpus=2 .* set search\.workers"),
    ("search.worker_gpus", ("search.worker_gpus=1",), r"worker_gpus=1\.0 .* set search\.workers"),
    *(
        (
            option,
            ("model=onnx", "model.path=net.onnx", argument),
            r"has no effect: model=onnx compresses a file",
        )
        for option, argument in (
            ("calibration.", "calibration.images=5"),
            ("finetune.", "finetune.epochs=3"),
            ("optim.", "optim=sgd"),
            ("train.", "train.epochs=3"),
            ("decomposition.sequential", "decomposition.sequential=true"),
            ("export.opset", "export.opset=18"),
            ("export.preprocess", "export.preprocess=true"),
            ("export.int8", "export.int8=true"),
            ("export.training", "export.training=true"),
            ("export.pad_channels", "export.pad_channels=true"),
            ("export.skip", "export.skip=true"),
            ("export.input_names", "export.input_names=[x]"),
            ("export.output_names", "export.output_names=[y]"),
            ("search.images", "search.images=50"),
            ("search.augmented", "search.augmented=true"),
            ("search.statistics", "search.statistics=refitted"),
            ("search.workers", "search.workers=2"),
        )
    ),
    *(
        (section, (*FILE, option), rf"{option} .* is a rule")
        for section, option in (("search.", "search.episodes=5"), ("reward.", "reward=amc"))
    ),
    *(
        (f"dataset.{name}", (*FILE, f"dataset.{name}={value}"), rf"dataset\.{name} means nothing for")
        for name, value in (("heldout", 5), ("train_images", 5), ("padding", 2), ("flip", "true"))
    ),
]


def check(arguments: tuple[str, ...]) -> None:
    check_applicable(values(*arguments), [each.lstrip("+").partition("=")[0] for each in arguments])


def test_every_rule_has_its_case() -> None:
    assert [rule.option for rule in RULES] == [option for option, _, _ in IDLE]


@pytest.mark.parametrize(("option", "arguments", "message"), IDLE)
def test_options_without_effect_are_refused(option: str, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check(arguments)
    assert str(refused.value).startswith(option.rstrip("."))


@pytest.mark.parametrize(
    "arguments",
    [
        ("task=train", "train.epochs=3", "model.checkpoint=a.th"),
        ("task=search", "train.epochs=3", "export.runs=5", "budget.latency=0.5"),
        ("task=apply", "plan=a.json", "calibration.images=64", "train.epochs=2"),
        ("task=finetune", "weights=a.safetensors", "finetune.epochs=3", "optim=sgd"),
        ("task=export", "weights=a.safetensors", "export.training=true", "optim=sgd"),
        ("task=search", "budget.params=0.4"),
        ("task=timing_kit", "decomposition=auto", "calibration.images=64", "export.batch=1"),
        ("budget.latency=0.5", "timing.table=a.json"),
        ("task=prune", "pruner=magnitude", "pruner.multiple=8", "prune.decompose_macs=0.5"),
        ("task=prune", "prune.decompose_macs=0.5", "selector=bayes", "decomposition=cp"),
        ("task=compare", "compare.seeds=[4]"),
        ("task=apply", "plan=runs/a/plan.json"),
        ("task=apply", "plan=a.json", "model=onnx", "model.path=net.onnx", "export.batch=4"),
        ("model=onnx", "model.path=net.onnx", "export.runtimes=[openvino]", "export.runtime=openvino"),
        ("model=onnx", "model.path=net.onnx", "selector=bayes", "search.episodes=5", "reward=amc"),
        ("task=export", "weights=a.safetensors"),
        ("task=report", "runs=multirun/a"),
        ("decomposition=auto", "decomposition.formats=[cp,tucker]"),
        ("decomposition=tensor_train", "decomposition.tensorised=true"),
        ("decomposition=cp", "decomposition.tensorised=false"),
        ("search.refit_images=50",),
        ("search.statistics=refitted", "search.refit_images=50"),
        ("search.workers=2", "search.cluster=ray", "search.worker_gpus=1"),
        ("task=evaluate", "budget.params=null"),
    ],
)
def test_options_with_an_effect_and_those_that_ask_for_nothing_pass(arguments: tuple[str, ...]) -> None:
    check(arguments)


def test_the_command_line_is_looked_at() -> None:
    check_overrides(["task=train", "train.epochs=3"])
    with pytest.raises(ConfigError, match=r"^search\.episodes=5 has no effect: task=train"):
        check_overrides(["task=train", "search.episodes=5"])


def test_each_job_of_a_sweep_is_looked_at() -> None:
    with pytest.raises(ConfigError, match=r"decomposition\.tensorised=true has no effect"):
        check_overrides(["-m", "decomposition=tensor_ring,tucker", "decomposition.tensorised=true"])


def test_plans_that_lose_blocks_are_not_refitted_unless_that_is_asked_for() -> None:
    arguments = ("search.refit_images=50", "decomposition.blocks=true", "budget.macs=0.5")
    with pytest.raises(ConfigError, match=r"refit_images=50 .* set search\.statistics=refitted"):
        check(arguments)
