"""Put drawn faces back into their frame: mask, edges, colours, and the way back through the alignment.

The steps and their order are DeepFaceLab's merger's in its mode "overlay". The mask is worked on at four times the
drawing's resolution, but at most at `MASK_SIDE` unless the drawing itself is larger; widths of `erode` and `blur` are
in pixels at four times, as DeepFaceLab counts them.

Not here: seamless cloning, histogram matching, motion blur, super-resolution, and the masks that an XSeg
network would draw while merging (masks that it applied to the aligned faces are `xseg`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mpt.systems.deepfacelab.data.colour_transfer import reinhard, transfer
from mpt.systems.deepfacelab.data.face_files import FaceFile, open_image
from mpt.systems.deepfacelab.data.face_geometry import Matrix, Points, compose, face_matrix, invert, transform_points
from mpt.systems.deepfacelab.data.face_masks import draw_hull, ellipse
from mpt.systems.deepfacelab.data.resampling import cut, resize

MaskMode = Literal["full", "dst", "learned-prd", "learned-dst", "learned", "learned-sum", "xseg", "learned-xseg"]
"""Which mask decides: all of the square; the hull of the destination's landmarks; what was drawn with the swap; what
was drawn with the destination; their product; their sum; what was painted or applied; the product of all three."""
Colours = Literal["none", "rct", "lct", "mkl", "idt", "sot"]
MASK_SCALE, MASK_SIDE = 4, 1024
NOISE = 1 / 255


@dataclass(frozen=True)
class MergeSettings:
    """How faces are put back."""

    mask: MaskMode = "learned"
    erode: int = 0
    """Pixels by which the mask is made smaller, or larger where negative."""
    blur: int = 0
    """Pixels over which its edge fades."""
    colours: Colours = "rct"
    """How the swap takes the frame's colours, see `colour_transfer`."""
    scale: float = 1.0
    """Size of the swapped face against the drawn one."""
    raw: bool = False
    """Put back the whole square as it was drawn: no mask, no colours."""
    sharpen: int = 0
    """How much the swap is sharpened at the frame's resolution, in DeepFaceLab's units of half a blurred difference."""


@dataclass(frozen=True)
class Drawn:
    """What the network drew of one face, float32 on the CPU: swap (3 s s), its mask and the destination's (1 s s)."""

    swap: Tensor
    swap_mask: Tensor
    dst_mask: Tensor


def frame_landmarks(face: FaceFile) -> Points:
    """Return a face's landmarks in its frame."""
    if face.source_landmarks is not None:
        return face.source_landmarks
    assert face.landmarks is not None
    assert face.source_matrix is not None, "checked when faces were matched to frames"
    return transform_points(face.landmarks, invert(face.source_matrix))


def cut_face(frame: Tensor, face: FaceFile, size: int, face_type: str) -> Tensor:
    """Return the face as the network wants it, (3 size size), from a frame of floats in [0, 1]."""
    return cut(frame, face_matrix(frame_landmarks(face), size, face_type), size, "bicubic", "zeros").clamp(0, 1)


def merge_face(
    frame: Tensor, face: FaceFile, drawn: Drawn, face_type: str, settings: MergeSettings, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the frame (3 h w) with a face swapped, and where it was, (1 h w)."""
    size = drawn.swap.shape[-1]
    landmarks = frame_landmarks(face)
    matrix = face_matrix(landmarks, size, face_type, settings.scale)
    if settings.raw:
        return paste(frame, drawn.swap, torch.ones_like(drawn.swap_mask), matrix)
    mask = choose_mask(face, drawn, face_type, settings.mask)
    edges = work_on_edges(mask, settings)
    swap = drawn.swap
    if settings.colours != "none":
        target = cut(frame, face_matrix(landmarks, size, face_type), size, "bicubic", "zeros").clamp(0, 1)
        area = F.interpolate(edges[None], (size, size), mode="bilinear", align_corners=False)[0] > 0
        swap = recolour(swap, target, area[0], settings.colours, seed)
    return paste(frame, swap, edges, matrix, settings.sharpen)


def choose_mask(face: FaceFile, drawn: Drawn, face_type: str, mode: MaskMode) -> Tensor:
    """Return the mask of one face, (1 s s)."""
    size = drawn.swap.shape[-1]
    if mode == "full":
        mask = torch.ones_like(drawn.swap_mask)
    elif mode == "dst":
        landmarks = transform_points(frame_landmarks(face), face_matrix(frame_landmarks(face), size, face_type))
        mask = torch.from_numpy(draw_hull(landmarks, size, face.brow_factor))[None]
    elif mode == "learned-prd":
        mask = drawn.swap_mask
    elif mode == "learned-dst":
        mask = drawn.dst_mask
    elif mode == "learned-sum":
        mask = drawn.swap_mask + drawn.dst_mask
    else:
        mask = torch.ones_like(drawn.swap_mask) if mode == "xseg" else drawn.swap_mask * drawn.dst_mask
        if mode != "learned":
            mask = mask * painted_mask(face, size, face_type)
    mask = mask.clamp(0, 1)
    return torch.where(mask < NOISE, 0.0, mask)


def painted_mask(face: FaceFile, size: int, face_type: str) -> Tensor:
    """Return the mask in a face's metadata, brought to the model's square."""
    assert face.landmarks is not None, "faces without metadata have no frame"
    side = open_image(face.read(), face.name).width
    drawn = torch.from_numpy(face.draw_face(side))[None]
    if face.kind == face_type:
        return resize(drawn, size, "bilinear")
    return cut(drawn, face_matrix(face.landmarks, size, face_type), size, "bilinear", "zeros")


def work_on_edges(mask: Tensor, settings: MergeSettings) -> Tensor:
    """Return a mask, enlarged, its edge moved and faded; nothing of it comes nearer to the border than the fade."""
    size = mask.shape[-1]
    side = min(size * MASK_SCALE, max(MASK_SIDE, size))
    unit = side / (size * MASK_SCALE)
    erode, blur = round(abs(settings.erode) * unit), round(settings.blur * unit)
    mask = F.interpolate(mask[None], (side, side), mode="bicubic", align_corners=False)[0].clamp(0, 1)
    padding = side // MASK_SCALE
    mask = F.pad(mask, (padding,) * 4)
    if erode:
        mask = spread(mask, erode) if settings.erode < 0 else 1 - spread(1 - mask, erode)
    border = padding + blur // 2
    inner = torch.zeros_like(mask)
    inner[..., border:-border, border:-border] = mask[..., border:-border, border:-border]
    mask = inner
    if blur:
        taps = blur | 1
        distance = torch.arange(taps, dtype=torch.float32) - taps // 2
        sigma = 0.3 * ((taps - 1) * 0.5 - 1) + 0.8
        kernel = torch.exp(-distance.square() / (2 * sigma**2))
        kernel = kernel / kernel.sum()
        mask = F.conv2d(mask[None], kernel.view(1, 1, taps, 1), padding=(taps // 2, 0))
        mask = F.conv2d(mask, kernel.view(1, 1, 1, taps), padding=(0, taps // 2))[0]
    return mask[..., padding:-padding, padding:-padding].clamp(0, 1)


def spread(mask: Tensor, size: int) -> Tensor:
    """Return the largest value within an ellipse around each pixel, (1 h w)."""
    height, width = mask.shape[-2:]
    anchor = size // 2
    padded = F.pad(mask, (size,) * 4)
    result = torch.zeros_like(mask)
    for row, element in enumerate(ellipse(size)):
        run = np.flatnonzero(element)
        if len(run):
            top, left = size + row - anchor, size + int(run[0]) - anchor
            lines = padded[:, top : top + height, left : left + width + len(run) - 1]
            result = torch.maximum(result, F.max_pool2d(lines[None], (1, len(run)), stride=1)[0])
    return result


def recolour(swap: Tensor, target: Tensor, area: Tensor, colours: Colours, seed: int) -> Tensor:
    """Return the swap with the colours of the frame's face; `area` (s s) is where the mask is."""
    image, reference = (picture.permute(1, 2, 0).numpy() for picture in (swap, target))
    part = area.numpy()
    if colours == "rct":
        result = reinhard(image, reference, part, part)
    else:
        if colours == "sot":
            image, reference = image * part[..., None], reference * part[..., None]
        result = transfer(colours, image, reference, np.random.default_rng(seed))
    return torch.from_numpy(np.ascontiguousarray(result, np.float32)).permute(2, 0, 1)


def sharpened(image: Tensor, amount: int) -> Tensor:
    """Return an image (3 h w) with its difference from its blur over 3 pixels added, half as often as `amount` says."""
    kernel = torch.tensor([0.25, 0.5, 0.25])
    padded = F.pad(image[None], (1, 1, 1, 1), mode="reflect")
    blurred = F.conv2d(padded, (kernel[:, None] * kernel).expand(3, 1, 3, 3), groups=3)[0]
    return image + 0.5 * amount * (image - blurred)


def paste(frame: Tensor, face: Tensor, mask: Tensor, matrix: Matrix, sharpen: int = 0) -> tuple[Tensor, Tensor]:
    """Return a frame with a face (3 s s) laid over it where its mask (1 m m) is, and the mask in the frame.

    Only the part of the frame that the face's square covers is worked on.
    """
    height, width = frame.shape[-2:]
    size, side = face.shape[-1], mask.shape[-1]
    corners = transform_points(np.array([(0, 0), (size, 0), (size, size), (0, size)]), invert(matrix))
    left, top = np.maximum(np.floor(corners.min(axis=0)).astype(int) - 2, 0)
    right, bottom = np.minimum(np.ceil(corners.max(axis=0)).astype(int) + 3, (width, height))
    covered = torch.zeros_like(frame[:1])
    if left >= right or top >= bottom:
        return frame, covered
    place = (slice(None), slice(top, bottom), slice(left, right))
    shift = np.array([[1.0, 0, -left], [0, 1.0, -top]])
    box = (int(bottom - top), int(right - left))
    back = compose(shift, invert(matrix))
    grown = compose(back, np.array([[size / side, 0, 0], [0, size / side, 0]]))
    swapped = cut(face, back, box, "bicubic", "border").clamp(0, 1)
    if sharpen and min(box) > 1:
        swapped = sharpened(swapped, sharpen).clamp(0, 1)
    covering = cut(mask, grown, box, "bicubic", "zeros").clamp(0, 1)
    covering = torch.where(covering < NOISE, 0.0, covering)
    result = frame.clone()
    result[place] = frame[place] * (1 - covering) + swapped * covering
    covered[place] = covering
    return result, covered
