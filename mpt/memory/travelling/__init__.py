"""Weights that travel between host and device."""
