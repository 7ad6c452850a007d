"""A ResNet and a ViT are tuned from local safetensors, frozen and with adapters; the exports are used alone."""

import csv
import shutil
from pathlib import Path

from telling import mpt, pictures, refused, write

from mpt import vision_ops

vision_ops.import_torchvision()
import timm  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

pictures("paints", {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}, count=16)
save_file(timm.create_model("resnet10t").state_dict(), "resnet.safetensors")
vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4)
save_file({f"module.{name}": value for name, value in vit.state_dict().items()}, "vit.safetensors")
write(
    "frozen.yaml",
    """
    model: {name: "timm:resnet10t", image_size: 32, weights: resnet.safetensors}
    dataset: {name: image_folder, root: paints}
    optimizer: {name: adamw, lr: 3e-3, parts: {"net.fc.*": {lr_scale: 2}}}
    train: {epochs: 6, batch_size: 16, freeze: ["net.conv1.*", "net.bn1.*", "net.layer[12].*"]}
    precision: fp32
    name: frozen
    """,
)
write(
    "adapted.yaml",
    """
    model:
      name: timm:vit_tiny_patch16_224
      image_size: 32
      weights: vit.safetensors
      options: {img_size: 32, patch_size: 8, depth: 4}
    dataset: {name: image_folder, root: paints}
    optimizer: {name: adamw, lr: 3e-3, parts: {"net.head.*": {lr_scale: 2}}}
    train: {epochs: 6, batch_size: 16}
    memory: {lora: 4}
    precision: fp32
    name: adapted
    """,
)


def labels(path: str) -> dict[str, str]:
    """Return what a table of `mpt infer` says of each file."""
    with Path(path).open(encoding="utf-8", newline="") as stream:
        return {row["input"]: row["label"] for row in csv.DictReader(stream)}


mpt(
    "train frozen.yaml",
    "loaded",
    "new: net.fc.weight (the file's is 1000x512, not 3x512)",
    "train.freeze",
    "done",
)
mpt(
    "train adapted.yaml",
    "loaded",
    "new: net.head.weight (the file's is 1000x192, not 3x192)",
    "memory.lora",
    "done",
)
mpt("convert adapted --to safetensors -o tuned.safetensors", "reads back as it was written")
mpt("infer adapted --input paints -o run.csv", "wrote 48 rows to run.csv")
shutil.move("runs", "elsewhere")  # the file alone is enough
mpt("infer tuned.safetensors --input paints -o export.csv", "wrote 48 rows to export.csv")
answers = labels("run.csv")
assert answers == labels("export.csv")
right = sum(Path(name).parent.name == label for name, label in answers.items())
assert right >= 40, f"{right} of 48"

refused(
    "train frozen.yaml model.weights=vit.safetensors", "model.weights", "vit.safetensors", code=4
)
