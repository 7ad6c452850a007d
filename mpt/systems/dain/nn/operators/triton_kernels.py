"""DAIN's operators as Triton kernels, one output pixel per lane; `triton_operators` calls them from autograd."""

from __future__ import annotations

import triton
import triton.language as tl

LANES = 128
"""Output pixels per program."""


@triton.jit
def landing(flow, pixel, real, height, width):
    """Return the flow of a block of pixels, where it leads (0 if outside), and whether that is inside."""
    u = tl.load(flow + pixel, mask=real, other=0.0)
    v = tl.load(flow + height * width + pixel, mask=real, other=0.0)
    x, y = (pixel % width).to(tl.float32) + u, (pixel // width).to(tl.float32) + v
    inside = real & (x >= 0) & (y >= 0) & (x <= width - 1) & (y <= height - 1)
    return u, v, tl.where(inside, x, 0.0), tl.where(inside, y, 0.0), inside


@triton.jit
def first_tap(flow, pixel, real, height, width):
    """Return the fractions past the floors, column and row of the first of 4 x 4 taps, and whether to interpolate."""
    u, v, x, y, inside = landing(flow, pixel, real, height, width)
    inside = inside & (tl.abs(u) < width / 2) & (tl.abs(v) < height / 2)
    x, y = tl.where(inside, x, 0.0), tl.where(inside, y, 0.0)
    return (
        x - tl.floor(x),
        y - tl.floor(y),
        tl.floor(x).to(tl.int32) - 1,
        tl.floor(y).to(tl.int32) - 1,
        inside,
    )


@triton.jit
def tap_of(a, b, left, top, tap: tl.constexpr, height, width):
    """Return the pixel that a tap reads, clamped to the image, and its bilinear weights across and down."""
    column = tl.minimum(tl.maximum(left + tap % 4, 0), width - 1)
    row = tl.minimum(tl.maximum(top + tap // 4, 0), height - 1)
    across = 1.0 - a if tap % 4 < 2 else a
    down = 1.0 - b if tap // 4 < 2 else b
    return row * width + column, across, down


@triton.jit
def correlate_kernel(
    first, second, out, channels, height, width, RADIUS: tl.constexpr, LANES: tl.constexpr
):
    """Write one displacement of the cost volume for a block of pixels of one sample."""
    pixel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    displacement, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    area, side = height * width, 2 * RADIUS + 1
    real = pixel < area
    x = pixel % width + displacement % side - RADIUS
    y = pixel // width + displacement // side - RADIUS
    inside = real & (x >= 0) & (x < width) & (y >= 0) & (y < height)
    total = tl.zeros([LANES], tl.float32)
    for channel in range(channels):
        start = (sample * channels + channel) * area
        one = tl.load(first + start + pixel, mask=real, other=0.0)
        other = tl.load(second + start + y * width + x, mask=inside, other=0.0)
        total += one.to(tl.float32) * other.to(tl.float32)
    tl.store(
        out + (sample * side * side + displacement) * area + pixel, total / channels, mask=real
    )


@triton.jit
def correlate_backward_kernel(
    grad,
    other,
    out,
    channels,
    height,
    width,
    SIGN: tl.constexpr,
    RADIUS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the gradient at the first map (SIGN 1, `other` the second) or at the second (SIGN -1, `other` the first).

    Each pixel collects from all displacements, so that nothing is added to by two.
    """
    pixel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    channel, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    area, side = height * width, 2 * RADIUS + 1
    real = pixel < area
    x, y = pixel % width, pixel // width
    total = tl.zeros([LANES], tl.float32)
    for displacement in range(side * side):
        there_x = x + SIGN * (displacement % side - RADIUS)
        there_y = y + SIGN * (displacement // side - RADIUS)
        inside = real & (there_x >= 0) & (there_x < width) & (there_y >= 0) & (there_y < height)
        there = there_y * width + there_x
        of_first = pixel if SIGN == 1 else there
        g = tl.load(
            grad + (sample * side * side + displacement) * area + of_first, mask=inside, other=0.0
        )
        value = tl.load(
            other + (sample * channels + channel) * area + there, mask=inside, other=0.0
        )
        total += g.to(tl.float32) * value.to(tl.float32)
    tl.store(out + (sample * channels + channel) * area + pixel, total / channels, mask=real)


@triton.jit
def project_kernel(flow, weight, steps, sums, height, width, LANES: tl.constexpr):
    """Add -w F and w of a block of source pixels to the four pixels that each lands on, as integers."""
    pixel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    sample = tl.program_id(1).to(tl.int64)
    area = height * width
    real = pixel < area
    u, v, x, y, inside = landing(flow + sample * 2 * area, pixel, real, height, width)
    w = tl.load(weight + sample * area + pixel, mask=real, other=0.0)
    left, top = tl.floor(x).to(tl.int32), tl.floor(y).to(tl.int32)
    step = tl.load(steps)
    add_u = tl.floor(-u * w * step + 0.5).to(tl.int64)
    add_v = tl.floor(-v * w * step + 0.5).to(tl.int64)
    add_w = tl.floor(w * step + 0.5).to(tl.int64)
    for corner in tl.static_range(4):
        column = tl.minimum(left + corner % 2, width - 1)
        row = tl.minimum(top + corner // 2, height - 1)
        place = sums + sample * 3 * area + row * width + column
        tl.atomic_add(place, add_u, mask=inside)
        tl.atomic_add(place + area, add_v, mask=inside)
        tl.atomic_add(place + 2 * area, add_w, mask=inside)


@triton.jit
def project_backward_kernel(
    flow,
    weight,
    out,
    share,
    grad_flow,
    grad_weight,
    height,
    width,
    ORIGINAL: tl.constexpr,
    LANES: tl.constexpr,
):
    """Collect the gradient of a block of source pixels from the four pixels that each has added to."""
    pixel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    sample = tl.program_id(1).to(tl.int64)
    area = height * width
    real = pixel < area
    start = sample * 2 * area
    u, v, x, y, inside = landing(flow + start, pixel, real, height, width)
    w = tl.load(weight + sample * area + pixel, mask=real, other=0.0)
    left, top = tl.floor(x).to(tl.int32), tl.floor(y).to(tl.int32)
    met_u = tl.zeros([LANES], tl.float32)
    met_v = tl.zeros([LANES], tl.float32)
    theirs = tl.zeros([LANES], tl.float32)
    for corner in tl.static_range(4):
        column = tl.minimum(left + corner % 2, width - 1)
        row = tl.minimum(top + corner // 2, height - 1)
        place = start + row * width + column
        share_u = tl.load(share + place, mask=inside, other=0.0)
        share_v = tl.load(share + place + area, mask=inside, other=0.0)
        out_u = tl.load(out + place, mask=inside, other=0.0)
        out_v = tl.load(out + place + area, mask=inside, other=0.0)
        met_u += share_u
        met_v += share_v
        theirs += share_u * out_u + share_v * out_v
    own = u * met_u + v * met_v
    tl.store(grad_flow + start + pixel, -w * met_u, mask=real)
    tl.store(grad_flow + start + area + pixel, -w * met_v, mask=real)
    tl.store(
        grad_weight + sample * area + pixel,
        -(own - theirs) if ORIGINAL else -(own + theirs),
        mask=real,
    )


@triton.jit
def filter_kernel(image, flow, kernel, out, channels, height, width, LANES: tl.constexpr):
    """Write a block of output pixels of one sample, every channel of them."""
    pixel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    sample = tl.program_id(1).to(tl.int64)
    area = height * width
    real = pixel < area
    a, b, left, top, inside = first_tap(flow + sample * 2 * area, pixel, real, height, width)
    for channel in range(channels):
        start = (sample * channels + channel) * area
        total = tl.zeros([LANES], tl.float32)
        for tap in tl.static_range(16):
            place, across, down = tap_of(a, b, left, top, tap, height, width)
            share = tl.load(kernel + (sample * 16 + tap) * area + pixel, mask=real, other=0.0)
            value = tl.load(image + start + place, mask=inside, other=0.0)
            total += down * across * share * value.to(tl.float32)
        own = tl.load(image + start + pixel, mask=real, other=0.0)
        tl.store(out + start + pixel, tl.where(inside, total, own.to(tl.float32)), mask=real)


@triton.jit
def filter_backward_kernel(
    image, flow, kernel, grad, grad_flow, grad_kernel, channels, height, width, LANES: tl.constexpr
):
    """Write the gradients at flow and kernel for a block of output pixels."""
    pixel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    sample = tl.program_id(1).to(tl.int64)
    area = height * width
    real = pixel < area
    a, b, left, top, inside = first_tap(flow + sample * 2 * area, pixel, real, height, width)
    along_x = tl.zeros([LANES], tl.float32)
    along_y = tl.zeros([LANES], tl.float32)
    for tap in tl.static_range(16):
        place, across, down = tap_of(a, b, left, top, tap, height, width)
        met = tl.zeros([LANES], tl.float32)
        for channel in range(channels):
            start = (sample * channels + channel) * area
            g = tl.load(grad + start + pixel, mask=inside, other=0.0)
            value = tl.load(image + start + place, mask=inside, other=0.0)
            met += g.to(tl.float32) * value.to(tl.float32)
        share = tl.load(kernel + (sample * 16 + tap) * area + pixel, mask=real, other=0.0)
        along_x += met * share * down * (-1.0 if tap % 4 < 2 else 1.0)
        along_y += met * share * across * (-1.0 if tap // 4 < 2 else 1.0)
        tl.store(grad_kernel + (sample * 16 + tap) * area + pixel, met * down * across, mask=real)
    tl.store(grad_flow + sample * 2 * area + pixel, along_x, mask=real)
    tl.store(grad_flow + (sample * 2 + 1) * area + pixel, along_y, mask=real)


@triton.jit
def filter_image_kernel(
    flow,
    kernel,
    grad,
    steps,
    sums,
    channels,
    height,
    width,
    COPIES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Add the gradient of a block of output pixels to the image's pixels that they were read from, as integers."""
    pixel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    sample = tl.program_id(1).to(tl.int64)
    area = height * width
    real = pixel < area
    a, b, left, top, inside = first_tap(flow + sample * 2 * area, pixel, real, height, width)
    step = tl.load(steps)
    for channel in range(channels):
        start = (sample * channels + channel) * area
        g = tl.load(grad + start + pixel, mask=real, other=0.0).to(tl.float32)
        for tap in tl.static_range(16):
            place, across, down = tap_of(a, b, left, top, tap, height, width)
            share = tl.load(kernel + (sample * 16 + tap) * area + pixel, mask=real, other=0.0)
            added = tl.floor(down * across * share * g * step + 0.5).to(tl.int64)
            tl.atomic_add(sums + start + place, added, mask=inside)
        if COPIES:
            copied = tl.floor(g * step + 0.5).to(tl.int64)
            tl.atomic_add(sums + start + pixel, copied, mask=real & (inside == 0))
