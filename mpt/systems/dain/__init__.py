"""Video frame interpolation: DAIN, RIFE and a plain baseline, with training, inference on video and published weights.

DAIN is Bao et al., "Depth-Aware Video Frame Interpolation", CVPR 2019; RIFE is Huang et al., "Real-Time Intermediate
Flow Estimation for Video Frame Interpolation", ECCV 2022. It does not estimate scene cuts by learning, and keeps no
alpha channel. How to use it: docs/how-to/dain.md and docs/how-to/rife.md.
"""
