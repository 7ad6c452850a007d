"""Comparisons of modes, configurations and settings."""
