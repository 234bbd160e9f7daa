"""Hold the results of a channel walk: the channel labels of every layer, norm, vector and padding."""

from __future__ import annotations

from dataclasses import dataclass, field

from pruning.labels import ChannelLabels, Labels


@dataclass(frozen=True)
class ChannelPad:
    """Labels that a zero-padding module puts before and after the channels it receives."""

    before: Labels
    after: Labels


@dataclass
class ChannelWalk:
    """Labels found by a channel walk, by name in order of execution."""

    labels: ChannelLabels = field(default_factory=ChannelLabels)
    producers: dict[str, Labels] = field(default_factory=dict)
    readers: dict[str, Labels] = field(default_factory=dict)
    norms: dict[str, Labels] = field(default_factory=dict)
    joint_norms: dict[str, Labels] = field(default_factory=dict)
    grouped: dict[str, tuple[Labels, Labels]] = field(default_factory=dict)
    vectors: dict[str, Labels] = field(default_factory=dict)
    pads: dict[str, ChannelPad] = field(default_factory=dict)
