"""Denoising networks trained from scratch: DDPM, EDM and rectified flow, with sampling.

Sources: Ho et al., "Denoising Diffusion Probabilistic Models", 2020; Karras et al., "Elucidating the Design Space of
Diffusion-Based Generative Models", 2022; Liu et al., "Flow Straight and Fast", 2022. How to use it:
docs/how-to/diffusion.md.
"""
