"""StyleGAN2 at 16 to 1024 pixels: the parameter counts of its authors, in native mixed precision.

Source: Karras et al., "Analyzing and Improving the Image Quality of StyleGAN", CVPR 2020, and "Training Generative
Adversarial Networks with Limited Data", NeurIPS 2020 (the augmentation). How to use it: docs/how-to/generative.md.
"""
