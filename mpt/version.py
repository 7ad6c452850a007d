"""The version of mpt, in a module of its own so that everything below the package may import it."""

VERSION = "0.1.0"
