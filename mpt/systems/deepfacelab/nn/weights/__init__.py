"""Weights in the layout of leras, DeepFaceLab's library."""
