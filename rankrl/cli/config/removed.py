"""Options that are constants, and what holds: for who still sets them."""

from __future__ import annotations

from collections.abc import Mapping

_AUGMENTATION = "the dataset says how, or that not at all: dataset.padding=0 dataset.flip=false"
_RECIPE = "rankrl.training.TrainingRecipe takes others"
_TRAINING = "pruning.MaskTrainingOptions takes others"
_GATES = "pruning.HardConcreteMask takes others"
_OF_TRAININGS = {
    "halvings": f"it is 4; {_RECIPE}",
    "temperature": f"it is 4; {_RECIPE}",
    "balance_cores": "cores are sized alike where finetune.product_decay is above 0",
    "augment": _AUGMENTATION,
}
_OF_PRETRAINING = {
    "noises": "0.1, 0.2, 0.3 and 0.5 in turn",
    "batches": "2",
    "term": "soft_agreement",
    "importance_scale": "2",
    "hidden": "[32, 32]",
    "steps": "400",
    "learning_rate": "0.003",
    "weight_decay": "0.1",
    "restraint": "0.05; pretrain.jitter does the like",
}
_OF_MASKS = {
    "augment": _AUGMENTATION,
    "mask_lr": "each mask has its own, faster in short trainings",
    "settling_epochs": "fine-tuning follows, finetune.epochs of it",
    "l1": f"it is 0; {_TRAINING}",
    "l2": f"it is 1e-4; {_TRAINING}",
    "unit_norm": f"norms are held; {_TRAINING}",
    "push_pull": f"network and masks learn in every step; {_TRAINING}",
    "trap_threshold": f"it is 0.05; {_TRAINING}",
    "checks_per_epoch": f"it is 4; {_TRAINING}",
    "temperature": f"it falls from 0.2 to 0.05; {_TRAINING}",
    "initial": "it is 1; pruning.GroupLassoMask takes others",
    "initial_log_alpha": f"it is 2.5; {_GATES}",
    "gamma": f"it is -0.1; {_GATES}",
    "zeta": f"it is 1.1; {_GATES}",
    "parametrisation": f"it is log_alpha; {_GATES}",
    "penalty_function": f"it is sigmoid; {_GATES}",
}
_OF_SELECTORS = {
    "buffer_episodes": "all episodes",
    "tau": "0.01",
    "final_noise": "0.05",
    "final_step": "0.05",
    "importance_scale": "2",
    "refinements": "2",
    "optimism": "0.5",
    "share": "0.3",
    "startup_trials": "10",
    "multivariate": "false",
    "batches": "2",
    "measured": "all; greedy measures one candidate of each layer",
}
_NO_CORES = "dense networks have no cores and no teacher; the section finetune has it"

REMOVED: Mapping[str, str] = {
    "dataset.root": "set the environment variable RANKRL_DATA, or dataset.path for files of your own",
    "decomposition.final_starts": "it is 1; decomposition.final_iterations makes fits longer",
    "search.batch_size": "the device decides how many images are scored at a time",
    "train.product_decay": _NO_CORES,
    "train.distillation": _NO_CORES,
    "train.restore_best": "the last epoch is kept, or with train.ema_decay the average",
    "finetune.label_smoothing": f"it is 0, as the teacher's answers are soft; {_RECIPE}",
    **{f"{each}.{name}": text for each in ("train", "finetune") for name, text in _OF_TRAININGS.items()},
    **{f"selector.{name}": f"it is {text}" for name, text in _OF_SELECTORS.items()},
    **{f"pretrain.{name}": f"it is {text}" for name, text in _OF_PRETRAINING.items()},
    **{f"pruner.{name}": text for name, text in _OF_MASKS.items()},
}
"""What holds instead of an option, by its name."""


def removal(name: str) -> str | None:
    """Return what to tell who sets an option that is a constant, or None for others."""
    return f"there is no option {name}: {REMOVED[name]}" if name in REMOVED else None
