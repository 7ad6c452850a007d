"""Layers and wrappers that several denoising networks share."""
