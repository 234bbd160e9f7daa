"""Launchers of sweeps that rankrl brings along; Hydra looks for plugins in the package `hydra_plugins` alone.

Hydra imports this at every start: what launchers do is in `rankrl.runs.sweeps`.
"""
