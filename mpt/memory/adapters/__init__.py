"""Adapters: thin layers that are trained alongside frozen ones."""
