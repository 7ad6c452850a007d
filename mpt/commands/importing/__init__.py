"""Other programs' configurations and command lines, translated: what `mpt import` consists of."""
