"""Weights made by a formula, with which DeepFaceLab computed what its detectors are compared with."""

import zlib

import numpy as np


def fill(model, name, shape):
    """The values of one tensor in leras's layout, by the model's name and the tensor's."""
    numbers = np.random.Generator(np.random.PCG64(zlib.crc32(f"{model}/{name}".encode())))
    leaf = name.rsplit("/", 1)[-1].split(":")[0]
    gain = 1.0
    if model == "S3FD":
        gain = 2**0.5
        if name.startswith("conv1_1/"):
            gain = 2**0.5 / 64
        if name.endswith("conf/weight:0"):
            gain = 3.0
        if name.endswith("loc/weight:0"):
            gain = 1.0
    if leaf == "eps":
        return np.full(shape, 1e-6, np.float32)
    if model == "S3FD" and len(shape) == 4 and tuple(shape[:3]) == (1, 1, 1):
        return (10 * numbers.uniform(0.5, 1.5, shape)).astype(np.float32)
    if len(shape) > 1:
        return (numbers.standard_normal(shape) * (gain / np.sqrt(np.prod(shape[:-1])))).astype(
            np.float32
        )
    if leaf in ("weight", "running_var"):
        return numbers.uniform(0.5, 1.5, shape).astype(np.float32)
    return (numbers.standard_normal(shape) * 0.1).astype(np.float32)
