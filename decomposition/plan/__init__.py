"""Compression plans: what becomes of every layer, as versioned JSON."""
