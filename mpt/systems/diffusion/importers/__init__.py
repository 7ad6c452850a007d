"""Configurations of other programs that `mpt import` reads for this system."""
