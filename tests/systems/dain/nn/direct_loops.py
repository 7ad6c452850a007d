"""DAIN's operators as loops over pixels, in float64: what the vectorised ones are checked against."""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def correlation(first: Array, second: Array, radius: int) -> Array:
    batch, channels, height, width = first.shape
    side = 2 * radius + 1
    out = np.zeros((batch, side * side, height, width))
    for b, dy, dx, y, x in np.ndindex(batch, side, side, height, width):
        row, column = y + dy - radius, x + dx - radius
        if 0 <= row < height and 0 <= column < width:
            out[b, dy * side + dx, y, x] = first[b, :, y, x] @ second[b, :, row, column] / channels
    return out


def projection(flow: Array, weight: Array) -> tuple[Array, Array]:
    batch, _, height, width = flow.shape
    out, count = np.zeros_like(flow), np.zeros_like(weight)
    for b, y, x in np.ndindex(batch, height, width):
        across, down = x + flow[b, 0, y, x], y + flow[b, 1, y, x]
        if not (0 <= across <= width - 1 and 0 <= down <= height - 1):
            continue
        left, top = math.floor(across), math.floor(down)
        for row in (top, min(top + 1, height - 1)):
            for column in (left, min(left + 1, width - 1)):
                out[b, :, row, column] -= weight[b, 0, y, x] * flow[b, :, y, x]
                count[b, 0, row, column] += weight[b, 0, y, x]
    return np.divide(out, count, out=np.zeros_like(out), where=count > 0), count


def filled(flow: Array, count: Array) -> Array:
    out = flow.copy()
    batch, _, height, width = flow.shape
    for b, y, x in np.ndindex(batch, height, width):
        if count[b, 0, y, x] > 0:
            continue
        rays = (
            [(y, column) for column in range(x - 1, -1, -1)],
            [(y, column) for column in range(x + 1, width)],
            [(row, x) for row in range(y - 1, -1, -1)],
            [(row, x) for row in range(y + 1, height)],
        )
        found = [next((p for p in ray if count[b, 0, p[0], p[1]] > 0), None) for ray in rays]
        values = [flow[b, :, p[0], p[1]] for p in found if p is not None]
        out[b, :, y, x] = np.mean(values, axis=0) if values else 0
    return out


def filter_interpolation(image: Array, flow: Array, kernel: Array) -> Array:
    out = image.copy()
    batch, _, height, width = image.shape
    for b, y, x in np.ndindex(batch, height, width):
        u, v = flow[b, 0, y, x], flow[b, 1, y, x]
        across, down = x + u, y + v
        inside = 0 <= across <= width - 1 and 0 <= down <= height - 1
        if not inside or abs(u) >= width / 2 or abs(v) >= height / 2:
            continue
        left, top = math.floor(across), math.floor(down)
        a, d = across - left, down - top
        total = np.zeros(image.shape[1])
        for j in range(4):
            for i in range(4):
                row, column = (
                    min(max(top - 1 + j, 0), height - 1),
                    min(max(left - 1 + i, 0), width - 1),
                )
                quadrant = (a if i >= 2 else 1 - a) * (d if j >= 2 else 1 - d)
                total += quadrant * kernel[b, 4 * j + i, y, x] * image[b, :, row, column]
        out[b, :, y, x] = total
    return out


def warp(image: Array, flow: Array, masked: bool) -> Array:
    out = np.zeros_like(image)
    batch, _, height, width = image.shape
    for b, y, x in np.ndindex(batch, height, width):
        across, down = x + flow[b, 0, y, x], y + flow[b, 1, y, x]
        left, top = math.floor(across), math.floor(down)
        total, covered = np.zeros(image.shape[1]), 0.0
        for row, wy in ((top, 1 - (down - top)), (top + 1, down - top)):
            for column, wx in ((left, 1 - (across - left)), (left + 1, across - left)):
                if 0 <= row < height and 0 <= column < width:
                    total += wy * wx * image[b, :, row, column]
                    covered += wy * wx
        out[b, :, y, x] = 0 if masked and covered < 0.9999 else total
    return out
