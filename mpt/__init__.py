"""Mixed-precision training that fits the card you have.

Importing `mpt` is cheap: torch is loaded by the rooms that need it, never here.
"""

__version__ = "0.1.0"
