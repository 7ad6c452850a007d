"""The networks as lists of numbered layers: the kind of each, and the layers it reads.

The numbers are those of the published programs, so that `model.12.cv1.conv.weight` is the same tensor in both. Layer 0
is the pair of cameras and 1 and 2 the visible and the infrared picture, if there are two. Widths are those of size
1.0 and scaled by the size's width.

The one-camera networks have been compared with the published programs in all sizes, the fusions in size n; the fusions'
larger sizes follow the same rules (YOLO11 and YOLO12 use deeper blocks from m on) and no published count exists for
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from mpt.systems.yolofuse.nn.layers.deyolo import DEA, DEFA, C2fBiFocus
from mpt.systems.yolofuse.nn.layers.yolo_attention import C2PSA, A2C2f, C3k2Attention
from mpt.systems.yolofuse.nn.layers.yolo_blocks import SPPF, C2f, C3k2, Camera, Concat, Conv
from mpt.systems.yolofuse.nn.layers.yolo_head import Detect

STRIDES = (8, 16, 32)
DEPTH_8 = {"n": 0.33, "s": 0.33, "m": 0.67, "l": 1.0, "x": 1.0}
WIDTH_8 = {"n": 0.25, "s": 0.5, "m": 0.75, "l": 1.0, "x": 1.25}
WIDEST_8 = {"n": 1024, "s": 1024, "m": 768, "l": 512, "x": 512}
DEPTH_11 = {"n": 0.5, "s": 0.5, "m": 0.5, "l": 1.0, "x": 1.0}
WIDTH_11 = {"n": 0.25, "s": 0.5, "m": 1.0, "l": 1.0, "x": 1.5}
WIDEST_11 = {"n": 1024, "s": 1024, "m": 512, "l": 512, "x": 512}


class Layer(NamedTuple):
    """A module, None for the cameras themselves, and the numbers of the layers that it reads."""

    module: nn.Module | None
    sources: tuple[int, ...]


@dataclass
class Plan:
    """A list of layers that grows. `depth`, `width` and `widest` scale the added layers."""

    classes: int
    depth: float
    width: float
    widest: int
    scale: str
    inputs: int = 3
    """Channels of the picture that a network without layers for its cameras reads."""
    layers: list[Layer] = field(default_factory=list)
    channels: list[int] = field(default_factory=list)
    branches: list[list[int]] = field(default_factory=list)
    """Numbers of the layers of each camera's backbone, in the order of a YOLO backbone."""

    @property
    def last(self) -> int:
        """Number of the latest layer."""
        return len(self.layers) - 1

    @property
    def is_deep(self) -> bool:
        """Do C3k2 blocks hold C3k blocks everywhere? So from size m on."""
        return self.scale in "mlx"

    def wide(self, channels: int) -> int:
        """Return a width scaled to the size, a multiple of 8."""
        return math.ceil(min(channels, self.widest) * self.width / 8) * 8

    def deep(self, repeats: int) -> int:
        """Return a number of repeats scaled to the size."""
        return max(round(repeats * self.depth), 1) if repeats > 1 else repeats

    def add(self, module: nn.Module | None, outputs: int, *sources: int) -> int:
        """Add a layer and return its number."""
        self.layers.append(Layer(module, sources))
        self.channels.append(outputs)
        return self.last

    def cameras(self) -> None:
        """Add the pair and the two pictures."""
        self.add(None, 6)
        self.add(Camera(0), 3, 0)
        self.add(Camera(1), 3, 0)

    def conv(self, outputs: int, source: int | None = None, groups: int = 1) -> int:
        """Add a 3x3 convolution of stride 2."""
        source, outputs = self.last if source is None else source, self.wide(outputs)
        return self.add(Conv(self.channels[source], outputs, 3, 2, groups), outputs, source)

    def block(self, make: Callable[[int, int], nn.Module], outputs: int, *sources: int) -> int:
        """Add a block that reads the latest layer, or the named ones."""
        sources, outputs = sources or (self.last,), self.wide(outputs)
        return self.add(make(self.channels[sources[0]], outputs), outputs, *sources)

    def c2f(
        self, outputs: int, repeats: int, shortcut: bool = False, source: int | None = None
    ) -> int:
        """Add a C2f block."""
        source = self.last if source is None else source
        return self.block(lambda i, o: C2f(i, o, self.deep(repeats), shortcut), outputs, source)

    def c3k2(self, outputs: int, deep: bool, source: int | None = None, ratio: float = 0.5) -> int:
        """Add a C3k2 block of two repeats, before scaling."""
        source = self.last if source is None else source
        return self.block(
            lambda i, o: C3k2(i, o, self.deep(2), deep or self.is_deep, ratio), outputs, source
        )

    def a2c2f(self, outputs: int, repeats: int, areas: int) -> int:
        """Add an area-attention block, or its C3k form if `areas` is 0."""
        return self.block(
            lambda i, o: A2C2f(i, o, self.deep(repeats), areas, self.scale in "lx"), outputs
        )

    def cat(self, *sources: int) -> int:
        """Add a concatenation."""
        return self.add(Concat(), sum(self.channels[n] for n in sources), *sources)

    def up(self, source: int | None = None) -> int:
        """Add a doubling by repetition."""
        source = self.last if source is None else source
        return self.add(
            nn.Upsample(scale_factor=2.0, mode="nearest"), self.channels[source], source
        )

    def first(self, outputs: int) -> int:
        """Add the 3x3 convolution of stride 2 that reads the picture itself."""
        return self.add(Conv(self.inputs, self.wide(outputs), 3, 2), self.wide(outputs), -1)

    def detect(
        self, sources: Sequence[int], light: bool, strides: Sequence[int] = STRIDES, **options: Any
    ) -> None:
        """Add the head."""
        channels = [self.channels[n] for n in sources]
        self.add(Detect(channels, self.classes, strides, light, **options), 0, *sources)


def _neck_8(plan: Plan, p3: int, p4: int, p5: int) -> None:
    """Add YOLOv8's neck (down and up again, all C2f) and its head."""
    plan.up(p5)
    plan.cat(plan.last, p4)
    middle = plan.c2f(512, 3)
    plan.up()
    plan.cat(plan.last, p3)
    small = plan.c2f(256, 3)
    plan.conv(256)
    plan.cat(plan.last, middle)
    middle = plan.c2f(512, 3)
    plan.conv(512)
    plan.cat(plan.last, p5)
    plan.detect((small, middle, plan.c2f(1024, 3)), light=False)


def _backbone_8(plan: Plan, source: int | None, focus: bool) -> tuple[int, int, int]:
    """Add YOLOv8's backbone and return its P3, P4 and P5."""
    first = plan.last + 1
    if source is None:
        plan.first(64)
    else:
        plan.conv(64, source)
    plan.conv(128)
    if focus:
        plan.block(lambda i, o: C2fBiFocus(i, o, plan.deep(3)), 128)
    else:
        plan.c2f(128, 3, True)
    plan.conv(256)
    p3 = plan.c2f(256, 6, True)
    plan.conv(512)
    p4 = plan.c2f(512, 6, True)
    plan.conv(1024)
    plan.c2f(1024, 3, True)
    p5 = plan.block(SPPF, 1024)
    plan.branches.append(list(range(first, plan.last + 1)))
    return p3, p4, p5


def yolov8(plan: Plan) -> None:
    """YOLOv8 on one picture."""
    _neck_8(plan, *_backbone_8(plan, None, False))


def _backbone_11(plan: Plan, adds: bool) -> tuple[int, int, int]:
    """Add YOLO11's backbone and return its P3, P4 and P5; `adds` is the form of YOLO26's pooling."""
    plan.first(64)
    plan.conv(128)
    plan.c3k2(256, False, ratio=0.25)
    plan.conv(256)
    p3 = plan.c3k2(512, False, ratio=0.25)
    plan.conv(512)
    p4 = plan.c3k2(512, True)
    plan.conv(1024)
    plan.c3k2(1024, True)
    plan.block(lambda i, o: SPPF(i, o, adds), 1024)
    p5 = plan.block(lambda i, o: C2PSA(o, plan.deep(2)), 1024)
    plan.branches.append(list(range(plan.last + 1)))
    return p3, p4, p5


def _neck_11(
    plan: Plan, p3: int, p4: int, p5: int, deep: bool, last: Callable[[Plan], int]
) -> tuple[int, int, int]:
    """Add YOLO11's neck, whose last block is `last`, and return the layers that the head reads."""
    plan.up(p5)
    plan.cat(plan.last, p4)
    middle = plan.c3k2(512, deep)
    plan.up()
    plan.cat(plan.last, p3)
    small = plan.c3k2(256, deep)
    plan.conv(256)
    plan.cat(plan.last, middle)
    middle = plan.c3k2(512, deep)
    plan.conv(512)
    plan.cat(plan.last, p5)
    return small, middle, last(plan)


def yolo11(plan: Plan) -> None:
    """YOLO11 on one picture."""
    levels = _neck_11(plan, *_backbone_11(plan, False), False, lambda own: own.c3k2(1024, True))
    plan.detect(levels, light=True)


def yolo26(plan: Plan) -> None:
    """YOLO26 on one picture: distances without a distribution, and a one-to-one head."""
    levels = _neck_11(
        plan, *_backbone_11(plan, True), True, lambda own: own.block(C3k2Attention, 1024)
    )
    plan.detect(levels, light=True, bins=1, one_to_one=True)


def early(plan: Plan) -> None:
    """Two C2f branches of half the width; from P2 on the visible branch reads both."""
    plan.cameras()
    visible, infrared = [plan.conv(32, 1)], [plan.conv(32, 2)]
    joined, merged = visible[0], []
    for width, repeats in ((64, 3), (128, 6), (256, 6), (512, 3)):
        visible.append(plan.conv(width, joined))
        infrared.append(plan.conv(width, infrared[-1]))
        visible.append(plan.c2f(width, repeats, True, visible[-1]))
        infrared.append(plan.c2f(width, repeats, True, infrared[-1]))
        joined = plan.cat(visible[-1], infrared[-1])
        merged.append(joined)
    plan.branches += [visible, infrared]
    p5 = plan.block(SPPF, 512, merged[3])
    _neck_8(plan, merged[1], merged[2], p5)


def mid(plan: Plan) -> None:
    """Two YOLO11 backbones, concatenated at P3, P4 and P5, and one light neck."""
    plan.cameras()
    visible, infrared = [1], [2]

    def step(add: Callable[[list[int]], int]) -> None:
        for branch in (visible, infrared):
            branch.append(add(branch))

    for branch in (visible, infrared):  # P2, one branch after the other; then in turn
        for width in (32, 64):
            branch.append(plan.conv(width, branch[-1]))
        branch.append(plan.c3k2(128, False, branch[-1], 0.25))
    step(lambda b: plan.conv(128, b[-1]))
    for branch in (visible, infrared):
        branch.append(plan.c3k2(256, False, branch[-1], 0.25))
        branch.append(plan.conv(256, branch[-1]))
    for branch in (visible, infrared):
        branch.append(plan.c3k2(256, True, branch[-1]))
        branch.append(plan.conv(512, branch[-1]))
    for branch in (visible, infrared):
        branch.append(plan.c3k2(512, True, branch[-1]))
        branch.append(plan.block(SPPF, 512, branch[-1]))
        branch.append(plan.block(lambda i, o: C2PSA(o, plan.deep(2)), 512, branch[-1]))
    plan.branches += [visible[1:], infrared[1:]]
    p3, p4, p5 = (plan.cat(visible[n], infrared[n]) for n in (5, 7, 11))
    plan.up(p5)
    plan.cat(plan.last, p4)
    middle = plan.c3k2(256, False)
    plan.up()
    plan.cat(plan.last, p3)
    small = plan.c3k2(128, False)
    plan.conv(128)
    plan.cat(plan.last, middle)
    middle = plan.c3k2(256, False)
    plan.conv(256)
    plan.cat(plan.last, p5)
    plan.detect((small, middle, plan.c3k2(512, True)), light=True)


def _backbone_12(plan: Plan, source: int) -> tuple[int, int, int]:
    """Add YOLO12's backbone with grouped convolutions and return its P3, P4 and P5."""
    first = plan.last + 1
    plan.conv(64, source)
    plan.conv(128, groups=2)
    plan.c3k2(256, False, ratio=0.25)
    plan.conv(256, groups=4)
    p3 = plan.c3k2(512, False, ratio=0.25)
    plan.conv(512)
    p4 = plan.a2c2f(512, 4, 4)
    plan.conv(1024)
    p5 = plan.a2c2f(1024, 4, 1)
    plan.branches.append(list(range(first, plan.last + 1)))
    return p3, p4, p5


def decision(plan: Plan) -> None:
    """Two whole YOLO12 networks; six maps into one head."""
    plan.cameras()
    pyramids = [_backbone_12(plan, camera) for camera in (1, 2)]
    levels: list[tuple[int, int, int]] = []
    for p3, p4, p5 in pyramids:
        plan.up(p5)
        plan.cat(plan.last, p4)
        middle = plan.a2c2f(512, 2, 0)
        plan.up()
        plan.cat(plan.last, p3)
        small = plan.a2c2f(256, 2, 0)
        plan.conv(256)
        plan.cat(plan.last, middle)
        middle = plan.a2c2f(512, 2, 0)
        plan.conv(512)
        plan.cat(plan.last, p5)
        levels.append((small, middle, plan.c3k2(1024, True)))
    pairs = [number for level in zip(*levels, strict=True) for number in level]
    plan.detect(pairs, light=True, strides=[s for s in STRIDES for _ in range(2)])


def easy(plan: Plan) -> None:
    """Two YOLO12 backbones, concatenated at P3, P4 and P5, and no way back down."""
    plan.cameras()
    visible, infrared = _backbone_12(plan, 1), _backbone_12(plan, 2)
    levels = []
    for pair, width in zip(zip(visible, infrared, strict=True), (256, 512, 1024), strict=True):
        plan.cat(*pair)
        levels.append(plan.a2c2f(width, 4, 0))
    plan.detect(levels, light=True)


def _enhanced(plan: Plan, fuse: Callable[[int, int], nn.Module]) -> None:
    plan.cameras()
    visible, infrared = _backbone_8(plan, 1, True), _backbone_8(plan, 2, True)
    fused = []
    for pair, width, side in zip(
        zip(visible, infrared, strict=True), (256, 512, 1024), (80, 40, 20), strict=True
    ):
        fused.append(plan.block(lambda i, o, s=side: fuse(o, s), width, *pair))  # type: ignore[misc]
    _neck_8(plan, *fused)


def deyolo(plan: Plan) -> None:
    """Two YOLOv8 backbones that enhance each other at P3, P4 and P5."""
    _enhanced(plan, DEA)


def defa(plan: Plan) -> None:
    """As deyolo, with a gated, attended sum in place of the enhancement."""
    _enhanced(plan, DEFA)


VARIANTS: dict[str, Callable[[Plan], None]] = {
    "early": early,
    "mid": mid,
    "decision": decision,
    "easy": easy,
    "deyolo": deyolo,
    "defa": defa,
}


ONE_PICTURE = ("rgb", "ir", "data")
"""Fusions whose network reads one picture, so that they come in each family."""
FAMILIES: dict[str, Callable[[Plan], None]] = {"yolov8": yolov8, "yolo11": yolo11, "yolo26": yolo26}


def make_plan(
    fusion: str, scale: str, classes: int, family: str = "yolov8", inputs: int = 3
) -> Plan:
    """Return the layers of a variant in a size; `family` and `inputs`, its channels, are those of one picture."""
    eleven = fusion in ("mid", "easy") or (fusion in ONE_PICTURE and family != "yolov8")
    depth, width = (DEPTH_11, WIDTH_11) if eleven else (DEPTH_8, WIDTH_8)
    widest = WIDEST_11 if eleven else WIDEST_8
    plan = Plan(classes, depth[scale], width[scale], widest[scale], scale, inputs)
    (FAMILIES[family] if fusion in ONE_PICTURE else VARIANTS[fusion])(plan)
    return plan
