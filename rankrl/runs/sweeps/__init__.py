"""Run sweeps: many runs of one command line, skipped when finished, and listed when failed."""
