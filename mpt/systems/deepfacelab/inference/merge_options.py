"""How faces are merged into their frames, and what is merged: the settings of a merge, and a drawn face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpt.systems.deepfacelab.data.faces.colour_transfer import Picture
from mpt.systems.deepfacelab.inference.filters import Sharpening

Mode = Literal[
    "overlay", "hist-match", "seamless", "seamless-hist-match", "original", "raw-rgb", "raw-predict"
]
"""How the face is put in: laid over; with the histogram of the frame's face; by OpenCV's seamless clone; not at all;
its whole square; or nothing but the drawing itself."""
MaskMode = Literal[
    "full", "dst", "learned-prd", "learned-dst", "learned", "learned-sum", "xseg", "learned-xseg", "xseg-prd",
    "xseg-dst", "xseg-both", "all",
]  # fmt: skip
"""Which mask decides: all of the square; the hull of the destination's landmarks; the one drawn with the swap; the one
drawn with the destination; their product; their sum; the one painted or applied; the product of all three; the one
that an XSeg network finds in the drawing, in the frame's face, in both; that times `learned`."""
Colours = Literal["none", "rct", "lct", "mkl", "mkl-m", "idt", "idt-m", "sot", "sot-m", "mix-m"]
NETWORK_MASKS = ("xseg-prd", "xseg-dst", "xseg-both", "all")
"""Masks that an XSeg network draws."""


@dataclass(frozen=True)
class MergeSettings:
    """How faces are put back."""

    mask: MaskMode = "learned"
    erode: int = 0
    """Pixels by which the mask is made smaller, or larger if negative."""
    blur: int = 0
    """Pixels over which its edge fades."""
    colours: Colours = "rct"
    """How the swap takes the frame's colours, see `colour_transfer`; -m: under the mask alone."""
    scale: float = 1.0
    """How much smaller the drawn face is put back."""
    mode: Mode = "overlay"
    sharpen: int = 0
    """Amount of sharpening; negative blurs."""
    sharpen_mode: Sharpening = "gaussian"
    hist_threshold: int = 238
    """How far through the frame's histogram a matched one goes, of 255."""
    hist_masked: bool = True
    """Match the histogram under the mask alone."""
    motion_blur: int = 0
    """Percent of the face's motion in the video over which it is blurred."""
    denoise: int = 0
    """Strength, in percent of one median filter, of the filters that the frame around the face goes through."""
    bicubic_degrade: int = 0
    """Percent by which the frame around the face is shrunk and enlarged again."""
    color_degrade: int = 0
    """Percent of a palette of 256 colours in the result."""
    super_resolution: int = 0
    """Percent of the enhanced face, at four times the resolution, in the drawn one."""

    @property
    def reworks(self) -> bool:
        """Is the face worked on once more after it was put in, which softens it?"""
        recolours = "seamless" in self.mode and self.colours != "none"
        filters = (self.motion_blur, self.sharpen, self.denoise, self.bicubic_degrade)
        return recolours or self.mode == "seamless-hist-match" or any(filters)


@dataclass(frozen=True)
class Drawn:
    """The network's drawing of one face: swap (s, s, 3), its mask and the destination's (s, s, 1)."""

    swap: Picture
    swap_mask: Picture
    dst_mask: Picture
