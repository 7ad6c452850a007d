"""DAIN's operators: warping, projection, correlation, in torch and in Triton."""
