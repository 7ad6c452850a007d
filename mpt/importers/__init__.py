"""Configurations of other programs that `mpt import` reads: a file per program, which recognises and translates it."""
