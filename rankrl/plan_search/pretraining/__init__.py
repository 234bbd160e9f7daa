"""Training one policy on many tasks, for networks, formats and budgets that it has not seen."""
