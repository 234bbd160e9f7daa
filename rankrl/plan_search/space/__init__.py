"""What is searched over: layers, candidates, costs and budgets."""
