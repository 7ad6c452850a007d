"""The pieces of `mpt plan`."""
