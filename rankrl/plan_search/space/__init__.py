"""The space of a search: layers, candidates, costs and budgets."""
