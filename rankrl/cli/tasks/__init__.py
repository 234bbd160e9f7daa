"""Carry out the tasks of `rankrl task=NAME`; no code below them sees the configuration."""
