"""Untrained networks that behave like trained ones, for tests."""

from torch import nn


def with_statistics(network: nn.Module) -> nn.Module:
    """Give the batch norms of a network random statistics, so that they do something, and return it.

    Weights and statistics follow from torch's seed.
    """
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return network.eval()
