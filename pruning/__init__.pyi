from .blocks import ResidualBlock, remove_blocks, require_blocks_suffice, residual_blocks
from .criteria import Criterion, reconstruction
from .errors import PruningError
from .groups import ChannelGroup, KeptChannels, channel_groups, removable_groups
from .masked_network import MaskedNetwork
from .masks import ChannelMask, GroupLassoMask, HardConcreteMask
from .registry import Pruner, get_pruner, list_pruners, register_pruner
from .removal import kept_inputs, kept_norms, remove_channels, untrained_copy
from .selection import keep_share, keep_within
from .training import (
    MaskEpoch,
    MaskTrainingOptions,
    MaskTrainingResult,
    MaskTrainingState,
    PushPull,
    QualityJump,
    StrengthController,
    train_masks,
)

__all__ = [
    "ChannelGroup",
    "ChannelMask",
    "Criterion",
    "GroupLassoMask",
    "HardConcreteMask",
    "KeptChannels",
    "MaskEpoch",
    "MaskTrainingOptions",
    "MaskTrainingResult",
    "MaskTrainingState",
    "MaskedNetwork",
    "Pruner",
    "PruningError",
    "PushPull",
    "QualityJump",
    "ResidualBlock",
    "StrengthController",
    "channel_groups",
    "get_pruner",
    "keep_share",
    "keep_within",
    "kept_inputs",
    "kept_norms",
    "list_pruners",
    "reconstruction",
    "register_pruner",
    "removable_groups",
    "remove_blocks",
    "remove_channels",
    "require_blocks_suffice",
    "residual_blocks",
    "train_masks",
    "untrained_copy",
]
