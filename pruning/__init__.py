"""Channel pruning: learn or compute which channels matter, then remove them physically.

    masked = MaskedNetwork(model, example_input, GroupLassoMask)
    train_masks(masked, batches, loss, MaskTrainingOptions(), cost=macs, target=0.5)
    smaller = masked.removed()

What goes together (`groups`), what matters (`criteria`, the masks) and the surgery (`removal`) are
independent: the surgery takes a plain mapping from layer names to kept output channels, wherever it comes
from.
"""

from pruning import reconstruction
from pruning.blocks import ResidualBlock, remove_blocks, require_blocks_suffice, residual_blocks
from pruning.criteria import Criterion
from pruning.errors import PruningError
from pruning.from_scratch import untrained_copy
from pruning.group_lasso import GroupLassoMask
from pruning.groups import ChannelGroup, KeptChannels, channel_groups, removable_groups
from pruning.hard_concrete import HardConcreteMask
from pruning.masked_network import MaskedNetwork
from pruning.masks import ChannelMask
from pruning.registry import Pruner, get_pruner, list_pruners, register_pruner
from pruning.removal import kept_inputs, kept_norms, remove_channels
from pruning.schedule import PushPull, StrengthController
from pruning.selection import keep_share, keep_within
from pruning.training import train_masks
from pruning.training_options import MaskEpoch, MaskTrainingOptions, MaskTrainingResult, QualityJump
from pruning.training_state import MaskTrainingState

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
