"""Potential-based shaping of rewards (Ng, Harada & Russell, ICML 1999) with the additive model of losses.

The potential of a state is what the network would lose, by that model, if the layers to come kept action 0.
Each step is paid the difference of potentials before and after it. The end has the potential 0, so that all
payments of an episode add up to the same number whatever its actions: no optimum moves, but an action that
costs the other layers much is told so at once.
"""

from __future__ import annotations

import numpy as np

from rankrl.plan_search.envs.actions import ActionMap


def potentials(chosen: ActionMap, actions: np.ndarray) -> np.ndarray:
    """Return the potentials of the states that episodes pass through.

    Args:
        chosen: What actions stand for.
        actions: Whole episodes, shape (episodes, layers, components) in [-1, 1].

    Returns:
        Minus the losses in units of those of greedy's plan, shape (episodes, layers + 1): -1 before the
        first action, 0 after the last.
    """
    episodes, layers, components = actions.shape
    taken = np.tri(layers, layers, -1)[None, :, :, None]  # (state, layer): the layers before the state's
    prefixes = (taken * actions[:, None]).reshape(-1, layers, components)
    losses = (chosen.loss_roots(prefixes) ** 2).sum(1).reshape(episodes, layers)
    found = np.zeros((episodes, layers + 1))
    found[:, :-1] = -losses / np.maximum(losses[:, :1], 1e-300)
    return found


def payments(chosen: ActionMap, actions: np.ndarray) -> np.ndarray:
    """Return what every step of episodes is paid, (episodes, layers); the sum over the layers is 1.

    Args:
        chosen: What actions stand for.
        actions: Whole episodes, shape (episodes, layers, components) in [-1, 1].
    """
    paid: np.ndarray = np.diff(potentials(chosen, actions), axis=1)
    return paid
