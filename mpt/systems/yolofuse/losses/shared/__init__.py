"""Shared by the parts of this folder."""
