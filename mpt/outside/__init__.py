"""Exceptions from code that is no part of mpt: said in one line, with the place in that code."""
