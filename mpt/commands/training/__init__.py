"""The pieces of `mpt train`."""
