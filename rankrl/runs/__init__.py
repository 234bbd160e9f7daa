"""Runs: their folders, locks and records, `sweeps` of many and `tracking` of each."""
