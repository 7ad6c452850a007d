"""Boxes from label files: YOLO txt, Pascal VOC XML (as LLVIP has it), COCO json.

Boxes come out as rows (class, left, top, right, bottom), float64, relative to the picture's width and height. A region
that COCO marks as a crowd has the class -1 - class (`crowd_of`): nothing is learnt from it, and a detection in it is no
false alarm. A fault in a file is described for the caller, who decides whether it stops the run (`BadLabel`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

import numpy as np

from mpt.errors import DataError
from mpt.foreign.files import LARGEST_RECORD_BYTES, read_json, read_text

Rows = np.ndarray[Any, np.dtype[np.float64]]
Size = tuple[float, float]
"""Width and height in pixels."""
NO_ROWS: Rows = np.zeros((0, 5))
SLACK = 1e-3
"""How far a side may lie outside of the picture, for rounding; it is cut off."""


class BadLabel(Exception):
    """A label file that cannot be used, and why."""


def checked(rows: Sequence[Sequence[float]], classes: int) -> Rows:
    """Return rows as an array. Raises BadLabel for a class that is not there and boxes off the picture or empty."""
    table = np.array(rows, float).reshape(-1, 5)
    for number, (kind, left, top, right, bottom) in enumerate(table.tolist(), 1):
        where = f"box {number}"
        if not all(map(math.isfinite, (kind, left, top, right, bottom))):
            raise BadLabel(f"{where} has a value that is no number")
        if kind != int(kind) or not 0 <= kind < classes:
            raise BadLabel(
                f"{where} is of class {kind:g}, and there are classes 0 to {classes - 1}"
            )
        if min(left, top) < -SLACK or max(right, bottom) > 1 + SLACK:
            raise BadLabel(
                f"{where} lies outside of the picture ({left:.4g} {top:.4g} to {right:.4g} {bottom:.4g})"
            )
        if right <= left or bottom <= top:
            raise BadLabel(f"{where} has no area")
    table[:, 1:] = table[:, 1:].clip(0, 1)
    return table


def crowd_of(kind: Any) -> Any:
    """Return the class under which a crowd's region is kept, or the class of one that is kept so."""
    return -1 - kind


def regions_of(rows: Sequence[Sequence[float]]) -> Rows:
    """Return crowds' regions, cut to the picture; of what is none, nothing: a picture is not bad for it."""
    table = np.array(rows, float).reshape(-1, 5)
    table = table[np.isfinite(table).all(1)]
    table[:, 0], table[:, 1:] = crowd_of(table[:, 0]), table[:, 1:].clip(0, 1)
    has_area = (table[:, 3] > table[:, 1]) & (table[:, 4] > table[:, 2])
    return np.asarray(table[has_area])


def read_yolo(path: Path, classes: int) -> Rows:
    """Read `class centre_x centre_y width height` lines, relative; longer lines are polygons, read as their boxes.

    A box that stands twice counts once, as in Ultralytics.
    """
    rows: list[list[float]] = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            kind, *values = (float(word) for word in line.split())
        except ValueError as error:
            raise BadLabel(
                f"line {number} holds something that is no number: {line.strip()[:40]!r}"
            ) from error
        if len(values) == 4:
            x, y, width, height = values
            if not all(0 <= value <= 1 for value in values):
                raise BadLabel(
                    f"line {number} has values outside of [0, 1], which YOLO labels are relative to"
                )
            # A centre at the edge gives a side outside of the picture, which is cut off as all readers do.
            sides = [
                max(x - width / 2, 0),
                max(y - height / 2, 0),
                min(x + width / 2, 1),
                min(y + height / 2, 1),
            ]
            rows.append([kind, *sides])
        elif len(values) >= 6 and len(values) % 2 == 0:
            across, down = values[::2], values[1::2]
            rows.append([kind, min(across), min(down), max(across), max(down)])
        else:
            raise BadLabel(f"line {number} has {len(values) + 1} values; 5 make a box")
    return checked(list(dict.fromkeys(map(tuple, rows))), classes)


def read_voc(path: Path, classes: Sequence[str]) -> tuple[Rows, Size]:
    """Read a Pascal VOC annotation: boxes, in pixels of the size that it states, and that size."""
    try:
        tree = ElementTree.fromstring(_text(path))
        width, height = (float(_find(tree, f"size/{side}")) for side in ("width", "height"))
        rows = []
        for entry in tree.iter("object"):
            name = _find(entry, "name").strip()
            if name not in classes:
                raise BadLabel(
                    f"it names the class {name!r}; dataset.classes are {', '.join(classes)}"
                )
            sides = [
                float(_find(entry, f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax")
            ]
            scale = (width, height, width, height)
            rows.append(
                [
                    classes.index(name),
                    *(side / size for side, size in zip(sides, scale, strict=True)),
                ]
            )
    except (ElementTree.ParseError, ValueError, ZeroDivisionError) as error:
        raise BadLabel(f"it is no VOC annotation ({error})") from error
    return checked(rows, len(classes)), (width, height)


def _find(tree: ElementTree.Element, name: str) -> str:
    text = tree.findtext(name)
    if text is None:
        raise BadLabel(f"it has no {name}")
    return text


def _text(path: Path) -> str:
    try:
        return read_text(path, LARGEST_RECORD_BYTES)
    except FileNotFoundError as error:
        raise BadLabel(
            "there is no such file; a picture without objects has an empty one"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadLabel(f"it cannot be read ({error})") from error


LARGEST_COCO_BYTES = 4 << 30
"""COCO's own training set has 470 MB with its outlines."""


@dataclass(frozen=True)
class CocoLabels:
    """A COCO file: boxes by the picture's file name, and the names of its categories in the order of their ids."""

    rows: dict[str, Rows]
    sizes: dict[str, Size]
    """File name -> the picture's width and height, as the file states them."""
    bad: dict[str, str]
    """File name -> why its boxes cannot be used."""
    classes: tuple[str, ...]
    by_last_part: dict[str, list[str]] = field(default_factory=dict)
    """Last part of a file name -> the names that end in it."""

    def __post_init__(self) -> None:
        for name in self.sizes:
            self.by_last_part.setdefault(name.rsplit("/", 1)[-1], []).append(name)

    def name_of(self, path: Path) -> str | None:
        """Return the file name that a picture is known by; None if none does. Raises BadLabel for several.

        It does if it is the end of the picture's path, if both end in the same folder and file, and if it
        is absolute, of the machine that the labels were made on, and the only one of its last part.
        """
        candidates = self.by_last_part.get(path.name, [])
        shared = {name: common_end(PurePosixPath(name).parts, path.parts) for name in candidates}
        most = max(shared.values(), default=0)
        best = [name for name in candidates if shared[name] == most]
        if len(best) > 1:
            raise BadLabel(
                f"it may be {best[0]} or {best[1]} of the COCO file; their folders do not say which"
            )
        for name in best:
            parts = PurePosixPath(name).parts
            is_foreign = name.startswith("/") or name[1:3] == ":/"
            if most == len(parts) or most > 1 or (is_foreign and len(candidates) == 1):
                return name
        return None


def common_end(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many last parts two paths share."""
    count = 0
    for one, other in zip(reversed(first), reversed(second), strict=False):
        if one != other:
            break
        count += 1
    return count


def read_coco(path: Path) -> CocoLabels:
    """Read a COCO instances file. Raises DataError for anything that is none."""
    try:
        content = read_json(path, LARGEST_COCO_BYTES)
        categories = sorted(content["categories"], key=lambda entry: int(entry["id"]))
        kinds = {int(entry["id"]): number for number, entry in enumerate(categories)}
        names = tuple(str(entry["name"]) for entry in categories)
        pictures = {
            int(entry["id"]): (
                str(PurePosixPath(entry["file_name"].replace("\\", "/"))),
                float(entry["width"]),
                float(entry["height"]),
            )
            for entry in content["images"]
        }
        boxes: dict[str, list[list[float]]] = {name: [] for name, _, _ in pictures.values()}
        crowds: dict[str, list[list[float]]] = {name: [] for name in boxes}
        for entry in content["annotations"]:
            name, width, height = pictures[int(entry["image_id"])]
            x, y, w, h = (float(value) for value in entry["bbox"])
            kind = kinds[int(entry["category_id"])]
            of_kind = crowds if entry.get("iscrowd") else boxes
            of_kind[name].append([kind, x / width, y / height, (x + w) / width, (y + h) / height])
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: it cannot be read ({error}); check dataset.labels") from error
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise DataError(
            f"{path}: it is no COCO instances file ({type(error).__name__}: {error})"
        ) from error
    rows, bad = {}, {}
    for name, own in boxes.items():
        try:
            rows[name] = np.concatenate((checked(own, len(names)), regions_of(crowds[name])))
        except BadLabel as error:
            bad[name] = str(error)
    sizes = {name: (width, height) for name, width, height in pictures.values()}
    return CocoLabels(rows, sizes, bad, names)
