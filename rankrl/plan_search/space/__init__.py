"""Describe the space of a search: layers, candidates, costs and budgets."""
