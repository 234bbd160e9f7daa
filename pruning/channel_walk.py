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
    """Everything the walk has seen, by name in order of execution."""

    labels: ChannelLabels = field(default_factory=ChannelLabels)
    producers: dict[str, Labels] = field(default_factory=dict)
    readers: dict[str, Labels] = field(default_factory=dict)
    norms: dict[str, Labels] = field(default_factory=dict)
    joint_norms: dict[str, Labels] = field(default_factory=dict)
    grouped: dict[str, tuple[Labels, Labels]] = field(default_factory=dict)
    vectors: dict[str, Labels] = field(default_factory=dict)
    pads: dict[str, ChannelPad] = field(default_factory=dict)
