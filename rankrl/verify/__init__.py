"""Verification: what a finished network answers, beside the original, and what it costs."""
