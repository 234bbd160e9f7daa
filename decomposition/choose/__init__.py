"""Choose compression plans within budgets in parameters, MACs, bytes and time."""
