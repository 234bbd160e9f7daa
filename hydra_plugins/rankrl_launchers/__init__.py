"""Register rankrl's launchers of sweeps; Hydra searches for plugins in the package `hydra_plugins` alone.

Hydra imports this at every start, so the code of the launchers is in `rankrl.runs.sweeps`.
"""
