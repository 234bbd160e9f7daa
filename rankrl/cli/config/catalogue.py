"""What the command line knows of all that is registered; `rankrl.cli.config.choices` says why.

Written by `scripts/make_config_reference.py` from the registries; a test checks that it is current.
"""

from __future__ import annotations

import collections.abc
import pathlib
import typing

from rankrl.cli.config.group import Choice, Group, catalogued

TASKS: dict[str, str] = {
    "apply": "rewrite the network under plan=PATH, without fine-tuning",
    "compare": "several selectors on the same evaluator, over several seeds",
    "evaluate": "test accuracy, parameters and MACs of model.checkpoint or weights=PATH",
    "export": "write the compressed network weights=PATH as a verified ONNX file",
    "finetune": "train the compressed network weights=PATH further, the dense one as teacher",
    "inspect": "list the layers: shape, cost and feasible ranks, or why not; errors if asked",
    "pipeline": "choose ranks, rewrite, fine-tune, export and report",
    "pretrain": "train one policy on many tasks: networks, formats, budgets",
    "prune": "remove channels or blocks to a target, fine-tune, export and report",
    "report": "gather all runs below runs=FOLDER in one page and one CSV file",
    "search": "choose ranks and write plan.json",
    "train": "train a network, from scratch or from model.checkpoint",
}
"""What each task does."""

FORMATS: dict[str, bool] = {
    "cp": False,
    "spatial_svd": False,
    "tensor_ring": True,
    "tensor_train": True,
    "tucker": False,
}
"""The tensor formats; whether they can split channel counts."""

GROUPS: dict[str, Group] = {
    "model": catalogued(
        "model",
        "architecture",
        {
            "conv4": Choice(
                {
                    "checkpoint": str | None,
                },
                {
                    "checkpoint": None,
                },
            ),
            "custom": Choice(
                {
                    "checkpoint": str | None,
                    "_target_": str,
                },
                {
                    "checkpoint": None,
                    "_target_": "???",
                },
                takes_others=True,
            ),
            "lenet5": Choice(
                {
                    "checkpoint": str | None,
                },
                {
                    "checkpoint": None,
                },
            ),
            "onnx": Choice(
                {
                    "checkpoint": str | None,
                    "path": str,
                },
                {
                    "checkpoint": None,
                    "path": "???",
                },
            ),
            "resnet20": Choice(
                {
                    "checkpoint": str | None,
                    "shortcut": str,
                },
                {
                    "checkpoint": None,
                    "shortcut": "A",
                },
            ),
            "resnet32": Choice(
                {
                    "checkpoint": str | None,
                    "shortcut": str,
                },
                {
                    "checkpoint": None,
                    "shortcut": "A",
                },
            ),
            "resnet44": Choice(
                {
                    "checkpoint": str | None,
                    "shortcut": str,
                },
                {
                    "checkpoint": None,
                    "shortcut": "A",
                },
            ),
            "resnet56": Choice(
                {
                    "checkpoint": str | None,
                    "shortcut": str,
                },
                {
                    "checkpoint": None,
                    "shortcut": "A",
                },
            ),
            "resnet9": Choice(
                {
                    "checkpoint": str | None,
                    "width": int,
                },
                {
                    "checkpoint": None,
                    "width": 64,
                },
            ),
            "torchvision": Choice(
                {
                    "checkpoint": str | None,
                    "name": str,
                },
                {
                    "checkpoint": None,
                    "name": "???",
                },
                takes_others=True,
            ),
        },
    ),
    "dataset": catalogued(
        "dataset",
        "name",
        {
            "cifar10": Choice(
                {
                    "root": str | pathlib.Path | None,
                    "heldout": int | None,
                    "train_images": int | None,
                    "mean": collections.abc.Sequence[float] | None,
                    "std": collections.abc.Sequence[float] | None,
                    "padding": int | None,
                    "flip": bool | None,
                },
                {
                    "root": None,
                    "heldout": None,
                    "train_images": None,
                    "mean": None,
                    "std": None,
                    "padding": None,
                    "flip": None,
                },
            ),
            "cifar100": Choice(
                {
                    "root": str | pathlib.Path | None,
                    "heldout": int | None,
                    "train_images": int | None,
                    "mean": collections.abc.Sequence[float] | None,
                    "std": collections.abc.Sequence[float] | None,
                    "padding": int | None,
                    "flip": bool | None,
                },
                {
                    "root": None,
                    "heldout": None,
                    "train_images": None,
                    "mean": None,
                    "std": None,
                    "padding": None,
                    "flip": None,
                },
            ),
            "digits": Choice(
                {
                    "root": str | pathlib.Path | None,
                    "heldout": int | None,
                    "train_images": int | None,
                    "mean": collections.abc.Sequence[float] | None,
                    "std": collections.abc.Sequence[float] | None,
                    "padding": int | None,
                    "flip": bool | None,
                },
                {
                    "root": None,
                    "heldout": None,
                    "train_images": None,
                    "mean": None,
                    "std": None,
                    "padding": None,
                    "flip": None,
                },
            ),
            "imagefolder": Choice(
                {
                    "root": str | pathlib.Path | None,
                    "heldout": int | None,
                    "train_images": int | None,
                    "mean": collections.abc.Sequence[float] | None,
                    "std": collections.abc.Sequence[float] | None,
                    "padding": int | None,
                    "flip": bool | None,
                    "path": str | pathlib.Path,
                    "size": int,
                    "resize": int | None,
                },
                {
                    "path": "???",
                    "size": 224,
                    "resize": None,
                    "root": None,
                    "heldout": None,
                    "train_images": None,
                    "mean": None,
                    "std": None,
                    "padding": None,
                    "flip": None,
                },
            ),
            "inputs": Choice(
                {
                    "root": str | pathlib.Path | None,
                    "heldout": int | None,
                    "train_images": int | None,
                    "mean": collections.abc.Sequence[float] | None,
                    "std": collections.abc.Sequence[float] | None,
                    "padding": int | None,
                    "flip": bool | None,
                    "path": str | pathlib.Path,
                    "size": int | None,
                    "resize": int | None,
                    "scale": float,
                    "order": str,
                    "batch_axes": collections.abc.Mapping[str, int | None] | None,
                },
                {
                    "path": "???",
                    "size": None,
                    "resize": None,
                    "scale": 1.0,
                    "order": "rgb",
                    "batch_axes": None,
                    "root": None,
                    "heldout": None,
                    "train_images": None,
                    "mean": None,
                    "std": None,
                    "padding": None,
                    "flip": None,
                },
            ),
            "mnist": Choice(
                {
                    "root": str | pathlib.Path | None,
                    "heldout": int | None,
                    "train_images": int | None,
                    "mean": collections.abc.Sequence[float] | None,
                    "std": collections.abc.Sequence[float] | None,
                    "padding": int | None,
                    "flip": bool | None,
                },
                {
                    "root": None,
                    "heldout": None,
                    "train_images": None,
                    "mean": None,
                    "std": None,
                    "padding": None,
                    "flip": None,
                },
            ),
            "npz": Choice(
                {
                    "root": str | pathlib.Path | None,
                    "heldout": int | None,
                    "train_images": int | None,
                    "mean": collections.abc.Sequence[float] | None,
                    "std": collections.abc.Sequence[float] | None,
                    "padding": int | None,
                    "flip": bool | None,
                    "path": str | pathlib.Path,
                    "classes": int | None,
                },
                {
                    "path": "???",
                    "classes": None,
                    "root": None,
                    "heldout": None,
                    "train_images": None,
                    "mean": None,
                    "std": None,
                    "padding": None,
                    "flip": None,
                },
            ),
        },
    ),
    "decomposition": catalogued(
        "format",
        "format",
        {
            "cp": Choice(
                {},
                {},
            ),
            "spatial_svd": Choice(
                {},
                {},
            ),
            "tensor_ring": Choice(
                {},
                {},
            ),
            "tensor_train": Choice(
                {},
                {},
            ),
            "tucker": Choice(
                {},
                {},
            ),
        },
    ),
    "selector": catalogued(
        "selector",
        "name",
        {
            "bayes": Choice(
                {
                    "policy": str | None,
                    "action": typing.Literal["importance", "rank"] | None,
                    "importance_scale": float,
                    "warmup_episodes": int,
                    "warmup_noise": float,
                    "step": float,
                    "final_step": float,
                    "candidates": int,
                    "refinements": int,
                    "optimism": float,
                    "plans_per_step": int,
                },
                {
                    "policy": None,
                    "action": None,
                    "importance_scale": 2.0,
                    "warmup_episodes": 15,
                    "warmup_noise": 0.15,
                    "step": 0.3,
                    "final_step": 0.05,
                    "candidates": 128,
                    "refinements": 2,
                    "optimism": 0.5,
                    "plans_per_step": 1,
                },
            ),
            "bayes_ddpg": Choice(
                {
                    "policy": str | None,
                    "action": typing.Literal["importance", "rank"] | None,
                    "importance_scale": float,
                    "warmup_episodes": int,
                    "warmup_noise": float,
                    "step": float,
                    "final_step": float,
                    "candidates": int,
                    "refinements": int,
                    "optimism": float,
                    "plans_per_step": int,
                    "policy_share": float,
                    "features": collections.abc.Sequence[
                        typing.Literal[
                            "macs", "curve", "descriptors", "identity", "budget_left", "last_reward", "plan"
                        ]
                    ],
                    "hidden": collections.abc.Sequence[int],
                    "learning_rate": float,
                },
                {
                    "policy": None,
                    "action": None,
                    "importance_scale": 2.0,
                    "warmup_episodes": 15,
                    "warmup_noise": 0.15,
                    "step": 0.3,
                    "final_step": 0.05,
                    "candidates": 128,
                    "refinements": 2,
                    "optimism": 0.5,
                    "plans_per_step": 1,
                    "policy_share": 0.5,
                    "features": ["identity", "plan"],
                    "hidden": [64, 64],
                    "learning_rate": 0.001,
                },
            ),
            "cmaes": Choice(
                {
                    "step": float,
                    "population": int | None,
                    "importance_scale": float,
                },
                {
                    "step": 0.3,
                    "population": None,
                    "importance_scale": 2.0,
                },
            ),
            "ddpg": Choice(
                {
                    "policy": str | None,
                    "action": typing.Literal["importance", "rank"] | None,
                    "features": tuple[
                        typing.Literal[
                            "macs", "curve", "descriptors", "identity", "budget_left", "last_reward", "plan"
                        ],
                        ...,
                    ],
                    "importance_scale": float,
                    "hidden": tuple[int, ...],
                    "learning_rate": float,
                    "batch_size": int,
                    "buffer_episodes": int | None,
                    "tau": float,
                    "warmup_episodes": int,
                    "warmup_noise": float,
                    "noise": float,
                    "final_noise": float,
                    "updates_per_episode": int | None,
                    "plans_per_step": int,
                },
                {
                    "policy": None,
                    "action": None,
                    "features": ["macs", "curve"],
                    "importance_scale": 2.0,
                    "hidden": [64, 64],
                    "learning_rate": 0.001,
                    "batch_size": 64,
                    "buffer_episodes": None,
                    "tau": 0.01,
                    "warmup_episodes": 15,
                    "warmup_noise": 0.15,
                    "noise": 0.3,
                    "final_noise": 0.05,
                    "updates_per_episode": None,
                    "plans_per_step": 1,
                },
            ),
            "divergence": Choice(
                {
                    "batches": int,
                },
                {
                    "batches": 2,
                },
            ),
            "energy": Choice(
                {},
                {},
            ),
            "greedy": Choice(
                {},
                {},
            ),
            "local": Choice(
                {
                    "step": float,
                    "share": float,
                    "importance_scale": float,
                    "plans_per_step": int,
                },
                {
                    "step": 0.3,
                    "share": 0.3,
                    "importance_scale": 2.0,
                    "plans_per_step": 1,
                },
            ),
            "random": Choice(
                {
                    "plans_per_step": int,
                },
                {
                    "plans_per_step": 1,
                },
            ),
            "sac": Choice(
                {
                    "policy": str | None,
                    "action": typing.Literal["importance", "rank"] | None,
                    "features": tuple[
                        typing.Literal[
                            "macs", "curve", "descriptors", "identity", "budget_left", "last_reward", "plan"
                        ],
                        ...,
                    ],
                    "importance_scale": float,
                    "hidden": tuple[int, ...],
                    "learning_rate": float,
                    "batch_size": int,
                    "buffer_episodes": int | None,
                    "tau": float,
                    "warmup_episodes": int,
                    "warmup_noise": float,
                    "noise": float,
                    "final_noise": float,
                    "updates_per_episode": int | None,
                    "plans_per_step": int,
                },
                {
                    "policy": None,
                    "action": None,
                    "features": ["macs", "curve"],
                    "importance_scale": 2.0,
                    "hidden": [64, 64],
                    "learning_rate": 0.001,
                    "batch_size": 64,
                    "buffer_episodes": None,
                    "tau": 0.01,
                    "warmup_episodes": 15,
                    "warmup_noise": 0.15,
                    "noise": 0.3,
                    "final_noise": 0.05,
                    "updates_per_episode": None,
                    "plans_per_step": 1,
                },
            ),
            "td3": Choice(
                {
                    "policy": str | None,
                    "action": typing.Literal["importance", "rank"] | None,
                    "features": tuple[
                        typing.Literal[
                            "macs", "curve", "descriptors", "identity", "budget_left", "last_reward", "plan"
                        ],
                        ...,
                    ],
                    "importance_scale": float,
                    "hidden": tuple[int, ...],
                    "learning_rate": float,
                    "batch_size": int,
                    "buffer_episodes": int | None,
                    "tau": float,
                    "warmup_episodes": int,
                    "warmup_noise": float,
                    "noise": float,
                    "final_noise": float,
                    "updates_per_episode": int | None,
                    "plans_per_step": int,
                },
                {
                    "policy": None,
                    "action": None,
                    "features": ["macs", "curve"],
                    "importance_scale": 2.0,
                    "hidden": [64, 64],
                    "learning_rate": 0.001,
                    "batch_size": 64,
                    "buffer_episodes": None,
                    "tau": 0.01,
                    "warmup_episodes": 15,
                    "warmup_noise": 0.15,
                    "noise": 0.3,
                    "final_noise": 0.05,
                    "updates_per_episode": None,
                    "plans_per_step": 1,
                },
            ),
            "tpe": Choice(
                {
                    "importance_scale": float,
                    "startup_trials": int,
                    "multivariate": bool,
                    "plans_per_step": int,
                },
                {
                    "importance_scale": 2.0,
                    "startup_trials": 10,
                    "multivariate": False,
                    "plans_per_step": 1,
                },
            ),
            "uniform": Choice(
                {},
                {},
            ),
            "vbmf": Choice(
                {},
                {},
            ),
        },
    ),
    "reward": catalogued(
        "reward",
        "name",
        {
            "accuracy": Choice(
                {},
                {},
            ),
            "amc": Choice(
                {
                    "measure": typing.Literal["params", "macs"],
                },
                {
                    "measure": "params",
                },
            ),
            "weighted": Choice(
                {
                    "compression": float,
                    "measure": typing.Literal["params", "macs"],
                },
                {
                    "compression": 0.3,
                    "measure": "params",
                },
            ),
        },
    ),
    "pruner": catalogued(
        "pruner",
        "name",
        {
            "apoz": Choice(
                {
                    "layers": tuple[str, ...] | None,
                    "scope": typing.Literal["uniform", "global", "per_cost"],
                    "multiple": int,
                },
                {
                    "layers": None,
                    "scope": "uniform",
                    "multiple": 1,
                },
            ),
            "blocks": Choice(
                {
                    "layers": tuple[str, ...] | None,
                },
                {
                    "layers": None,
                },
            ),
            "first_k": Choice(
                {
                    "layers": tuple[str, ...] | None,
                    "scope": typing.Literal["uniform", "global", "per_cost"],
                    "multiple": int,
                },
                {
                    "layers": None,
                    "scope": "uniform",
                    "multiple": 1,
                },
            ),
            "group_lasso": Choice(
                {
                    "layers": tuple[str, ...] | None,
                    "rewind": bool | None,
                    "initial": float,
                    "epochs": int,
                    "settling_epochs": int,
                    "strength": float,
                    "strengths": collections.abc.Mapping[str, float],
                    "l1": float,
                    "l2": float,
                    "unit_norm": bool,
                    "push_pull": tuple[int, int],
                    "trap_threshold": float | None,
                    "limit": float | None,
                    "checks_per_epoch": int,
                    "batch_size": int,
                    "lr": float,
                    "mask_lr": float | None,
                    "augment": bool,
                },
                {
                    "layers": None,
                    "rewind": None,
                    "initial": 1.0,
                    "epochs": 10,
                    "settling_epochs": 0,
                    "strength": 0.001,
                    "strengths": {},
                    "l1": 0.0,
                    "l2": 0.0001,
                    "unit_norm": True,
                    "push_pull": [0, 0],
                    "trap_threshold": 0.05,
                    "limit": None,
                    "checks_per_epoch": 4,
                    "batch_size": 128,
                    "lr": 0.001,
                    "mask_lr": None,
                    "augment": True,
                },
            ),
            "hard_concrete": Choice(
                {
                    "layers": tuple[str, ...] | None,
                    "rewind": bool | None,
                    "initial_log_alpha": float,
                    "gamma": float,
                    "zeta": float,
                    "parametrisation": typing.Literal["log_alpha", "alpha"],
                    "penalty_function": typing.Literal["sigmoid", "hard_sigmoid"],
                    "epochs": int,
                    "settling_epochs": int,
                    "strength": float,
                    "strengths": collections.abc.Mapping[str, float],
                    "l1": float,
                    "l2": float,
                    "unit_norm": bool,
                    "push_pull": tuple[int, int],
                    "trap_threshold": float | None,
                    "limit": float | None,
                    "temperature": tuple[float, float],
                    "checks_per_epoch": int,
                    "batch_size": int,
                    "lr": float,
                    "mask_lr": float | None,
                    "augment": bool,
                },
                {
                    "layers": None,
                    "rewind": None,
                    "initial_log_alpha": 2.5,
                    "gamma": -0.1,
                    "zeta": 1.1,
                    "parametrisation": "log_alpha",
                    "penalty_function": "sigmoid",
                    "epochs": 10,
                    "settling_epochs": 0,
                    "strength": 0.001,
                    "strengths": {},
                    "l1": 0.0,
                    "l2": 0.0001,
                    "unit_norm": True,
                    "push_pull": [0, 0],
                    "trap_threshold": 0.05,
                    "limit": None,
                    "temperature": [0.2, 0.05],
                    "checks_per_epoch": 4,
                    "batch_size": 128,
                    "lr": 0.001,
                    "mask_lr": None,
                    "augment": True,
                },
            ),
            "magnitude": Choice(
                {
                    "layers": tuple[str, ...] | None,
                    "scope": typing.Literal["uniform", "global", "per_cost"],
                    "multiple": int,
                },
                {
                    "layers": None,
                    "scope": "uniform",
                    "multiple": 1,
                },
            ),
            "random": Choice(
                {
                    "layers": tuple[str, ...] | None,
                    "scope": typing.Literal["uniform", "global", "per_cost"],
                    "multiple": int,
                },
                {
                    "layers": None,
                    "scope": "uniform",
                    "multiple": 1,
                },
            ),
            "reconstruction": Choice(
                {
                    "layers": tuple[str, ...] | None,
                    "scope": typing.Literal["uniform", "global", "per_cost"],
                    "multiple": int,
                },
                {
                    "layers": None,
                    "scope": "per_cost",
                    "multiple": 1,
                },
            ),
        },
    ),
    "optim": catalogued(
        "optimizer",
        "name",
        {
            "onnx_adagrad": Choice(
                {
                    "decay_factor": float,
                    "epsilon": float,
                    "norm_coefficient": float,
                    "first_update_count": int,
                    "maximize": bool,
                    "foreach": bool | None,
                    "capturable": bool,
                },
                {},
            ),
            "onnx_adam": Choice(
                {
                    "alpha": float,
                    "beta": float,
                    "epsilon": float,
                    "norm_coefficient": float,
                    "norm_coefficient_post": float,
                    "first_update_count": int,
                    "maximize": bool,
                    "foreach": bool | None,
                    "capturable": bool,
                },
                {},
            ),
            "sgd": Choice(
                {
                    "momentum": float,
                    "dampening": float,
                    "weight_decay": float,
                    "nesterov": bool,
                    "maximize": bool,
                    "foreach": bool | None,
                },
                {},
            ),
        },
        nested=True,
    ),
    "tracking": catalogued(
        "tracker",
        "name",
        {
            "csv": Choice(
                {},
                {},
            ),
            "mlflow": Choice(
                {
                    "uri": str | None,
                    "experiment": str,
                },
                {
                    "uri": None,
                    "experiment": "rankrl",
                },
            ),
            "tensorboard": Choice(
                {},
                {},
            ),
            "wandb": Choice(
                {
                    "project": str,
                    "mode": str | None,
                },
                {
                    "project": "rankrl",
                    "mode": None,
                },
            ),
            "none": Choice(
                {},
                {},
            ),
        },
        nested=True,
    ),
}
"""The groups whose choices are registered."""
