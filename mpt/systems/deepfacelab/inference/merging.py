"""Put drawn faces back into their frame: mask, edges, colours, and the way back through the alignment.

The steps and their order are DeepFaceLab's merger's, and OpenCV does them as there, so that a frame comes out as its
own would (`tests/systems/deepfacelab/inference/test_merging.py`). Pictures are float32 in [0, 1], B, G, R; masks are
(h, w, 1). The mask is worked on at four times the drawing's resolution, in whose pixels `erode` and `blur` are. With
super-resolution the face itself is worked on at that resolution, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpt.systems.deepfacelab.data.faces.colour_transfer import (
    Picture,
    match_covariance,
    match_histogram,
    move_least,
    reinhard,
    transfer,
)
from mpt.systems.deepfacelab.data.faces.face_files import FaceFile, open_image
from mpt.systems.deepfacelab.data.faces.face_geometry import (
    Matrix,
    Points,
    face_matrix,
    invert,
    transform_points,
)
from mpt.systems.deepfacelab.data.faces.face_masks import HULL_PARTS, raise_brows
from mpt.systems.deepfacelab.data.faces.opencv import opencv
from mpt.systems.deepfacelab.inference.filters import (
    blur_along,
    degrade,
    reduce_colours,
    sharpen,
    to_levels,
)
from mpt.systems.deepfacelab.inference.masks import Enhance, Segment
from mpt.systems.deepfacelab.inference.merge_options import Colours, Drawn, MaskMode, MergeSettings

MASK_SCALE = 4
NOISE = np.float32(1 / 255)
SMALLEST = 4
"""Faces whose mask covers less than this many pixels of the frame each way are left out."""
SOT_DIRECTIONS = 30
XSEG_SIDE = 256
MOST_MOTION = 50
MOTION_SIDE = 256
ENLARGED = 2
"""How much longer a motion blur is with super-resolution."""


@dataclass(frozen=True)
class Motion:
    """A face's movement from the frame before to the one after: pixels, and direction in degrees."""

    power: float = 0.0
    degrees: float = 0.0


STILL = Motion()


def frame_landmarks(face: FaceFile) -> Points:
    """Return a face's landmarks in its frame."""
    if face.source_landmarks is not None:
        return face.source_landmarks
    assert face.landmarks is not None
    assert face.source_matrix is not None, "checked when faces were matched to frames"
    return transform_points(face.landmarks, invert(face.source_matrix))


def motion_between(before: Points, after: Points) -> Motion:
    """Return the motion of a face by its landmarks in the frames before and after."""
    middle = np.array([[MOTION_SIDE // 2 - 1, MOTION_SIDE // 2 - 1]])
    ends = [
        transform_points(middle, invert(face_matrix(points, MOTION_SIDE, "f")))[0]
        for points in (before, after)
    ]
    x, y = ends[1] - ends[0]
    return Motion(float(np.hypot(x, y)), float(-np.degrees(np.arctan2(y, x))))


def cut_face(frame: Picture, landmarks: Points, size: int, face_type: str) -> Picture:
    """Return the frame's face, (size, size, 3)."""
    return cut(frame, face_matrix(landmarks, size, face_type), size).clip(0, 1)


def show_face(
    frame: Picture, landmarks: Points, size: int, face_type: str, super_resolution: int
) -> Picture:
    """Return the face as the network gets it, (size, size, 3).

    With super-resolution DeepFaceLab cuts it at four times the size and shrinks that, which moves it by 3/8 of a pixel.
    """
    large = size * MASK_SCALE if super_resolution else size
    face = cut_face(frame, landmarks, large, face_type)
    return np.asarray(opencv().resize(face, (size, size), interpolation=opencv().INTER_LINEAR))


def merge_face(
    frame: Picture,
    face: FaceFile,
    drawn: Drawn,
    face_type: str,
    settings: MergeSettings,
    *,
    numbers: Any = None,
    motion: Motion = STILL,
    segment: Segment | None = None,
    enhance: Enhance | None = None,
) -> tuple[Picture, Picture]:
    """Return the frame (h, w, 3) with a face swapped, and its area, (h, w, 1); of `raw-predict` the face alone.

    `numbers` draws the random numbers of the colour transfer.
    """
    padding, landmarks = drawn.swap.shape[0], frame_landmarks(face)
    if settings.super_resolution:
        assert enhance is not None, "checked with the settings"
        drawn = enhanced(drawn, settings.super_resolution, enhance)
    size = drawn.swap.shape[0]
    target = cut_face(frame, landmarks, size, face_type)
    small = choose_mask(face, frame, drawn, face_type, settings.mask, segment)
    edges = enlarge(small, padding)
    if "raw" not in settings.mode:
        edges = work_on_edges(edges, padding, settings)
    mask = put(
        edges, face_matrix(landmarks, padding * MASK_SCALE, face_type, settings.scale), frame
    )
    mask = without_noise(mask.clip(0, 1))[..., None]
    if settings.mode == "original":
        return frame, mask
    matrix = face_matrix(landmarks, size, face_type, settings.scale)
    edges = resized(edges, size)[..., None]
    if settings.mode == "raw-predict":
        return drawn.swap, edges
    if settings.mode == "raw-rgb":
        square = put(np.ones_like(drawn.swap), matrix, frame)
        return blend(frame, put(drawn.swap, matrix, frame), square), mask
    if not large_enough(mask):
        return frame, mask
    area = (edges > 0).astype(np.float32)
    swap = drawn.swap
    if settings.colours != "none" and "seamless" not in settings.mode:
        swap = recolour(swap, target, area, settings.colours, numbers)
    if settings.mode == "hist-match":
        swap = match_under(swap, target, area, settings)
    result = put(swap, matrix, frame).clip(0, 1)
    if "seamless" in settings.mode:
        result = clone(result, frame, mask)
    result = blend(frame, result, mask)
    if settings.reworks:
        upright = face_matrix(landmarks, size, face_type)
        again = rework(cut(result, upright, size), target, area, settings, numbers, motion)
        result = blend(
            degrade(frame, settings.denoise, settings.bicubic_degrade),
            put(again, upright, frame),
            mask,
        )
    if settings.color_degrade:
        share = settings.color_degrade / 100
        result = result * (1 - share) + reduce_colours(result) * share
    return result.astype(np.float32), mask


def enhanced(drawn: Drawn, percent: int, enhance: Enhance) -> Drawn:
    """Return a drawing at four times its resolution, the enhanced face blended into it, with its masks."""
    large, share = enhance(drawn.swap), percent / 100
    size = large.shape[0]
    plain = opencv().resize(drawn.swap, (size, size), interpolation=opencv().INTER_LINEAR)
    swap = (plain * (1 - share) + large * share).clip(0, 1).astype(np.float32)
    return Drawn(
        swap,
        *(resized(mask[..., 0], size)[..., None] for mask in (drawn.swap_mask, drawn.dst_mask)),
    )


def resized(picture: Picture, size: int) -> Picture:
    """Return a picture with sides of `size` pixels, resampled cubically."""
    if picture.shape[:2] == (size, size):
        return picture
    return np.asarray(opencv().resize(picture, (size, size), interpolation=opencv().INTER_CUBIC))


def lay_together(faces: Sequence[tuple[Picture, Picture]]) -> tuple[Picture, Picture]:
    """Return one frame of several, each with one face swapped and its mask: later ones lie over earlier."""
    result, mask = faces[0]
    for further, covering in faces[1:]:
        result = blend(result, further, covering)
        mask = (mask + covering).clip(0, 1)
    return result, mask


def blend(one: Picture, other: Picture, share: Picture) -> Picture:
    """Return a picture with another laid over it, in [0, 1]. Only if its share is not 0 anything is computed."""
    result = one.copy()
    rows, columns = (np.flatnonzero(share.any(axis=axis)) for axis in ((1, 2), (0, 2)))
    if len(rows):
        box = (slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
        result[box] = (one[box] * (1 - share[box]) + other[box] * share[box]).clip(0, 1)
    return result


def cut(frame: Picture, matrix: Matrix, size: int) -> Picture:
    """Return the quadrilateral that a matrix maps to the square of `size` pixels."""
    cv2 = opencv()
    return np.asarray(cv2.warpAffine(frame, matrix, (size, size), flags=cv2.INTER_CUBIC))


def put(face: Picture, matrix: Matrix, frame: Picture) -> Picture:
    """Return a square mapped by the matrix's inverse, in a black picture of the frame's size."""
    cv2 = opencv()
    flags = cv2.WARP_INVERSE_MAP | cv2.INTER_CUBIC
    return np.asarray(cv2.warpAffine(face, matrix, frame.shape[1::-1], flags=flags))


def choose_mask(
    face: FaceFile,
    frame: Picture,
    drawn: Drawn,
    face_type: str,
    mode: MaskMode,
    segment: Segment | None = None,
) -> Picture:
    """Return the mask of one face, (s, s)."""
    size, landmarks = drawn.swap.shape[0], frame_landmarks(face)
    learned = drawn.swap_mask * drawn.dst_mask
    if mode == "full":
        mask = np.ones((size, size), np.float32)
    elif mode == "dst":
        mask = cut(
            draw_hull(landmarks, frame.shape), face_matrix(landmarks, size, face_type), size
        ).clip(0, 1)
    elif mode in ("learned-prd", "learned-dst", "learned"):
        mask = {"learned-prd": drawn.swap_mask, "learned-dst": drawn.dst_mask, "learned": learned}[
            mode
        ][..., 0]
    elif mode == "learned-sum":
        mask = (drawn.swap_mask + drawn.dst_mask)[..., 0].clip(0, 1)
    elif mode in ("xseg", "learned-xseg"):
        mask = painted_mask(face, size, face_type) * (1 if mode == "xseg" else learned[..., 0])
    else:
        assert segment is not None, "checked with the settings"
        mask = segmented(frame, landmarks, drawn.swap, face_type, mode, segment)
        mask = mask * learned[..., 0] if mode == "all" else mask
    return without_noise(mask)


def segmented(
    frame: Picture,
    landmarks: Points,
    swap: Picture,
    face_type: str,
    mode: MaskMode,
    segment: Segment,
) -> Picture:
    """Return the XSeg network's mask of the drawing, of the frame's face, or of both, (s, s)."""
    cv2, size = opencv(), swap.shape[0]
    found = np.ones((size, size), np.float32)
    faces = []
    if mode != "xseg-dst":
        faces.append(cv2.resize(swap, (XSEG_SIDE, XSEG_SIDE), interpolation=cv2.INTER_CUBIC))
    if mode != "xseg-prd":
        faces.append(cut(frame, face_matrix(landmarks, XSEG_SIDE, face_type), XSEG_SIDE))
    for picture in faces:
        found = found * cv2.resize(segment(picture), (size, size), interpolation=cv2.INTER_CUBIC)
    return found


def draw_hull(landmarks: Points, shape: Sequence[int]) -> Picture:
    """Return the face by its landmarks in a frame, (h, w). The brows are raised as DeepFaceLab raises them here, by a
    factor of one whatever the face's own.
    """
    cv2 = opencv()
    mask = np.zeros(shape[:2], np.float32)
    points = raise_brows(landmarks, 1.0)
    for part in HULL_PARTS:
        cv2.fillConvexPoly(mask, cv2.convexHull(points[list(part)].astype(np.int32)), 1)
    return mask


def painted_mask(face: FaceFile, size: int, face_type: str) -> Picture:
    """Return the mask in a face's metadata, brought to the model's square, (size, size)."""
    cv2 = opencv()
    assert face.landmarks is not None, "faces without metadata have no frame"
    painted = face.draw_face(open_image(face.read(), face.name).width)
    if face.kind == face_type:
        return np.asarray(cv2.resize(painted, (size, size), interpolation=cv2.INTER_LINEAR))
    matrix = face_matrix(face.landmarks, size, face_type)
    return np.asarray(cv2.warpAffine(painted, matrix, (size, size), flags=cv2.INTER_LINEAR))


def without_noise(mask: Picture) -> Picture:
    """Return a mask whose values below a grey level are 0."""
    return np.where(mask < NOISE, np.float32(0), mask).astype(np.float32)


def enlarge(mask: Picture, size: int) -> Picture:
    """Return a mask at four times the drawing's resolution."""
    return resized(mask, size * MASK_SCALE)


def work_on_edges(mask: Picture, padding: int, settings: MergeSettings) -> Picture:
    """Return a mask with its edge moved and faded; nothing of it comes nearer to the border than half the fade."""
    cv2 = opencv()
    mask = np.pad(mask, padding)
    if settings.erode:
        width = abs(settings.erode)
        element = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (width, width))
        mask = (cv2.erode if settings.erode > 0 else cv2.dilate)(mask, element, iterations=1)
    border = padding + settings.blur // 2
    inner = np.zeros_like(mask)
    inner[border:-border, border:-border] = mask[border:-border, border:-border]
    mask = inner
    if settings.blur:
        taps = settings.blur | 1
        mask = cv2.GaussianBlur(mask, (taps, taps), 0)
    return np.asarray(mask[padding:-padding, padding:-padding].clip(0, 1))


def large_enough(mask: Picture) -> bool:
    """Does a mask cover enough of the frame for a face to be worked on?"""
    counted = mask[..., 0] >= 0.1
    rows, columns = (np.flatnonzero(counted.any(axis=axis)) for axis in (1, 0))
    return len(rows) > 0 and bool(min(np.ptp(rows), np.ptp(columns)) >= SMALLEST)


def recolour(
    image: Picture, target: Picture, area: Picture, colours: Colours, numbers: Any
) -> Picture:
    """Return a face with the colours of the frame's face; `area` (s, s, 1) is the mask's."""
    if colours == "rct":
        return reinhard(image, target, area, area)
    if colours == "lct":
        return match_covariance(image, target).astype(np.float32)
    if colours.endswith("-m") or colours == "sot":
        image, target = image * area, target * area
    if colours.startswith("mkl"):
        return move_least(image, target).clip(0, 1).astype(np.float32)
    return transfer(colours.removesuffix("-m"), image, target, numbers, SOT_DIRECTIONS)


def match_under(swap: Picture, target: Picture, area: Picture, settings: MergeSettings) -> Picture:
    """Return the swap with the histograms of the frame's face; pixels that are not counted are white."""
    counted = area if settings.hist_masked else np.ones_like(area)
    ours, theirs = ((picture * counted + (1 - counted)).clip(0, 1) for picture in (swap, target))
    return match_histogram(ours, theirs, settings.hist_threshold)


def clone(face: Picture, frame: Picture, mask: Picture) -> Picture:
    """Return the face in its frame as OpenCV's seamless clone puts it there; unchanged if that fails."""
    cv2 = opencv()
    levels = [(mask > step / 10).astype(np.uint8) * 255 for step in range(1, 10)]
    chosen = next((level for level in levels if level.any()), None)
    if chosen is None:
        return face
    left, top, width, height = cv2.boundingRect(chosen)
    middle = (int(left + width / 2), int(top + height / 2))
    source, target = (to_levels(picture) for picture in (face, frame))
    try:
        cloned = cv2.seamlessClone(source, target, chosen, middle, cv2.NORMAL_CLONE)
    except cv2.error:  # a face at the edge of its frame: DeepFaceLab takes it as it is, too
        return face
    return np.asarray(cloned.astype(np.float32) / 255)


def rework(
    face: Picture,
    target: Picture,
    area: Picture,
    settings: MergeSettings,
    numbers: Any,
    motion: Motion,
) -> Picture:
    """Return a face that was put in and cut out again, with the changes made to it."""
    if "seamless" in settings.mode and settings.colours != "none":
        face = recolour(face, target, area, settings.colours, numbers)
    if settings.mode == "seamless-hist-match":
        face = match_histogram(face, target, settings.hist_threshold)
    reach = int(motion.power * settings.motion_blur / 100)
    if reach >= 1:
        taps = min(reach + 1, MOST_MOTION) * (ENLARGED if settings.super_resolution else 1)
        face = blur_along(face, taps, motion.degrees)
    return sharpen(face, settings.sharpen_mode, settings.sharpen) if settings.sharpen else face
