"""Pictures with captions: `a.png` and, next to it, `a.txt`; a mask is `a-masklabel.png`, as OneTrainer has it.

Folders are read with all that lies below them. A folder called `10_name` is repeated ten times, as kohya's programs do.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpt.data.pictures.decoding import EXTENSIONS
from mpt.errors import DataError
from mpt.foreign.files import read_text

LARGEST_CAPTION_BYTES = 1 << 16
REPEATS = re.compile(r"(\d{1,4})_.*")
MASK_END = "-masklabel"


@dataclass(frozen=True)
class Captioned:
    """One picture."""

    path: Path
    caption: str
    repeats: int
    mask: Path | None = None
    weight: float = 1.0
    """Of its loss."""

    @property
    def place(self) -> int:
        """A number by which pictures are shared out, which does not change when others come or go."""
        return int.from_bytes(hashlib.sha256(self.path.name.encode()).digest()[:8], "big")


def find_pictures(
    folder: Path, common: str | None, masks: Path | None = None, where: str = "PICTURES"
) -> list[Captioned]:
    """Return a folder's pictures in the order of their paths.

    `common` is the caption of pictures without one, `masks` another folder of masks. Raises DataError for a folder
    without pictures, pictures without captions or masks, and captions without pictures.
    """
    folder = folder.expanduser()
    if not folder.is_dir():
        raise DataError(f"{where}: there is no folder {folder}")
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")
    )
    images = [path for path in files if path.suffix.lower() in EXTENSIONS]
    pictures = [path for path in images if not path.stem.endswith(MASK_END)]
    if not pictures:
        raise DataError(f"{where}: {folder} holds no pictures ({', '.join(EXTENSIONS)})")
    stems = {path.with_suffix("") for path in pictures}
    alone = [
        path
        for path in files
        if path.suffix.lower() == ".txt" and path.with_suffix("") not in stems
    ]
    if alone:
        raise DataError(
            f"{where}: {listed(alone)} is a caption without a picture; add the picture, or remove it"
        )
    without = [path for path in pictures if not path.with_suffix(".txt").is_file()]
    if without and common is None:
        wanted = without[0].with_suffix(".txt").name
        raise DataError(
            f"{where}: {listed(without)} has no caption ({wanted}); write one, or give all such one with --caption"
        )
    known = {
        path.with_name(path.stem.removesuffix(MASK_END)): path
        for path in images
        if path not in pictures
    }
    return [
        Captioned(
            path,
            common if path in without and common is not None else read_caption(path),
            repeats_of(path, folder),
            known.get(path.with_suffix("")) or mask_in(masks, path),
        )
        for path in pictures
    ]


def mask_in(folder: Path | None, picture: Path) -> Path | None:
    """Return a picture's mask in a folder of masks. Raises DataError if there is a folder, and no mask in it."""
    if folder is None:
        return None
    masks = [folder.expanduser() / f"{picture.stem}{end}" for end in EXTENSIONS]
    found = next((path for path in masks if path.is_file()), None)
    if found is None:
        raise DataError(f"--masks: {folder} has no {picture.stem}.png, the mask of {picture}")
    return found


def with_prior(
    train: Sequence[Captioned], prior: Sequence[Captioned], weight: float
) -> list[Captioned]:
    """Return the pictures to train on and as many of the class, which come again, or are left out, to that number."""
    order = sorted(prior, key=lambda one: one.place)
    return [
        *train,
        *(
            replace(order[number % len(order)], weight=weight, mask=None)
            for number in range(len(train))
        ),
    ]


def read_caption(picture: Path) -> str:
    """Return a picture's caption on one line. Raises DataError for a file that is no text."""
    path = picture.with_suffix(".txt")
    try:
        return " ".join(read_text(path, LARGEST_CAPTION_BYTES).split())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text in UTF-8") from error


def repeats_of(picture: Path, root: Path) -> int:
    """Return how often a picture's folder says that it counts."""
    inside = picture.parent.relative_to(root).parts
    found = [match for match in (REPEATS.fullmatch(part) for part in (root.name, *inside)) if match]
    return max(int(found[-1][1]), 1) if found else 1


def split(
    pictures: Sequence[Captioned], share: float, least: int
) -> tuple[list[Captioned], list[Captioned]]:
    """Return the pictures to train on, repeats included, and those held out: a share, `least` at least.

    Raises DataError if nothing is left to train on.
    """
    order = sorted(pictures, key=lambda one: one.place)
    count = max(round(share * len(order)), least)
    if len(order) <= count:
        raise DataError(
            f"PICTURES: {len(order)} pictures, of which {count} are held out; give more"
        )
    test = set(order[:count])
    train = [one for one in pictures if one not in test for _ in range(one.repeats)]
    return train, [one for one in pictures if one in test]


def listed(paths: Sequence[Path]) -> str:
    """Return some files by name."""
    more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
    return f"{paths[0]}{more}"
