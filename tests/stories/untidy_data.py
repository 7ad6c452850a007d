"""A folder as it comes off a disk: broken files, a PDF called jpg, twins, test classes that are not trained."""

import csv
from pathlib import Path

from telling import mpt, pictures, refused, write

COLOURS = {"hat": (200, 40, 40), "shoe": (40, 200, 40)}
pictures("shop/train", COLOURS, count=12)
pictures("shop/test", COLOURS, count=4)
write("shop/train/hat/receipt.jpg", "%PDF-1.4")
Path("shop/train/hat/empty.png").touch()
whole = Path("shop/train/shoe/0.png").read_bytes()
Path("shop/train/shoe/half.png").write_bytes(whole[: len(whole) // 2])
write("shop/train/shoe/notes.txt", "ask for prices")
write("shop/train/.DS_Store", "")
write(
    "mine.yaml",
    """
    model: {name: small_cnn, image_size: 16, features: 8}
    dataset: {name: image_folder, root: shop}
    train: {epochs: 2, batch_size: 8}
    name: shop
    """,
)
refused("train mine.yaml name=stops", "dataset.on_bad_image", code=3)
said = mpt(
    "doctor mine.yaml --only data",
    "3 samples unreadable",
    "in the training and in the test set",
    code=6,
)
assert len(said) < 1500, said
said = mpt("train mine.yaml dataset.on_bad_image=skip", "skipped_files.csv", "on 8 test samples")
with Path("runs/shop/skipped_files.csv").open(encoding="utf-8", newline="") as stream:
    skipped = [Path(row["path"]).name for row in csv.DictReader(stream)]
assert sorted(skipped) == ["empty.png", "half.png", "receipt.jpg"], skipped
assert "skipped" in Path("runs/shop/report.md").read_text("utf-8")

mpt("infer shop --input shop/train/hat -o all", "listed in", "empty.png")  # as it was configured
refused("infer shop --input shop/nothing", "shop/nothing", code=3)
(Path("shop/test") / "shoe").rename("shop/test/boot")
refused("train mine.yaml dataset.on_bad_image=skip", "boot", code=3)
refused("train mine.yaml dataset.root=shoop", "shoop", code=3)
