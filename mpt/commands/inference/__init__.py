"""The pieces of `mpt infer`."""
