"""Define, apply, save and load compression plans: the operations on every layer."""
