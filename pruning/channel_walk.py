"""What a walk through a network finds out about its channels."""

from __future__ import annotations

from dataclasses import dataclass, field

from pruning.labels import ChannelLabels, Labels


@dataclass(frozen=True)
class ChannelPad:
    """A module that pads channels with zeros: the labels it puts before and after the ones it receives."""

    before: Labels
    after: Labels


@dataclass
class ChannelWalk:
    """Everything the walk has seen, by name in order of execution.

    Attributes:
        labels: the union-find behind all labels.
        producers: labels of the output channels of each dense convolution and linear layer.
        readers: labels of the input channels (or features) of the same layers.
        norms: labels of the channels of each batch, instance and group norm, and of each PReLU.
        joint_norms: labels of the channels of each layer and RMS norm, which has one mean and variance.
        grouped: labels of the input and of the output channels of each grouped convolution.
        vectors: labels of the entries of each parameter or buffer of one value per channel.
        pads: the modules that pad channels with zeros.
    """

    labels: ChannelLabels = field(default_factory=ChannelLabels)
    producers: dict[str, Labels] = field(default_factory=dict)
    readers: dict[str, Labels] = field(default_factory=dict)
    norms: dict[str, Labels] = field(default_factory=dict)
    joint_norms: dict[str, Labels] = field(default_factory=dict)
    grouped: dict[str, tuple[Labels, Labels]] = field(default_factory=dict)
    vectors: dict[str, Labels] = field(default_factory=dict)
    pads: dict[str, ChannelPad] = field(default_factory=dict)
