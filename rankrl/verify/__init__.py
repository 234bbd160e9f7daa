"""Verification: what a finished network answers, compared with the original, and what it costs."""
