"""NVIDIA's network pickles and names."""
