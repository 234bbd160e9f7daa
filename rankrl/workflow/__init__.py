"""The steps that tasks are made of, with plain typed arguments."""
