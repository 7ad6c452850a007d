"""args.yaml of Ultralytics' detectors, or their command line (`yolo detect train model=yolov8n.pt imgsz=640`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpt.importers.shared.translation import Translation, epochs, is_true

NAME = "Ultralytics"
OWN = (
    "imgsz",
    "lr0",
    "lrf",
    "close_mosaic",
    "hsv_h",
    "box",
    "dfl",
    "mosaic",
    "warmup_epochs",
    "cos_lr",
)
SIMPLE = {
    "imgsz": "model.image_size",
    "workers": "dataset.workers",
    "seed": "seed",
    "box": "task.box_gain",
    "cls": "task.class_gain",
    "dfl": "task.distance_gain",
    "name": "name",
    "lrf": "optimizer.last_lr",
}
CHANGES = {
    "mosaic": ("mosaic", 1.0),
    "mixup": ("mixup", 0.0),
    "fliplr": ("flip_across", 0.5),
    "flipud": ("flip_down", 0.0),
    "hsv_h": ("hue", 0.015),
    "hsv_s": ("saturation", 0.7),
    "hsv_v": ("brightness", 0.4),
    "translate": ("translate", 0.1),
    "scale": ("scale", 0.5),
}
"""Its change of pictures -> ours under `dataset`, and its default."""
TURNING = ("degrees", "shear", "perspective", "copy_paste", "cutmix", "bgr")
"""Changes that are not here, if they are not 0."""
FUSED = re.compile(r"(?i)deyolo|defa|(mid|early|easy|decision|data)(?=-(level|fuse))")
"""A network of YOLOFuse's, by its file's name."""
NOMINAL = 64
"""The batch that its optimizer steps on: smaller ones are accumulated up to it."""


def recognises(given: Mapping[str, Any], words: str) -> bool:
    """Return whether the command is called yolo, or two of its own settings are there."""
    return words.startswith("yolo ") or sum(name in given for name in OWN) >= 2


def translate(into: Translation) -> None:
    """Take model, data, length, batch, optimizer and losses."""
    written = str(into.take("model", default="yolo26n.pt"))
    network = re.search(r"(yolov8|yolo11|yolo26)([nsmlx])", written)
    into.put("model.name", "yolofuse", f"model: {written}")
    fusion = FUSED.search(Path(written).name)
    cameras = into.take("ch", default=6 if fusion else 3)
    if fusion is None and int(cameras) == 6:
        into.leave("model", written, "model.fusion: the network of two cameras that it names")
    both = fusion is not None or int(cameras) == 6
    into.put(
        "model.fusion",
        fusion[0].casefold() if fusion else "mid" if both else "rgb",
        f"model: {written}" if fusion else "ch: 6" if both else "one camera",
    )
    into.put("model.family", network[1] if network else "yolov8", f"model: {written}")
    into.put("model.scale", network[2] if network else "n", f"model: {written}")
    if network is None and not both:
        into.leave(
            "model", written, "it is none of yolov8, yolo11 and yolo26 in a size n, s, m, l or x"
        )
    if written.endswith(".pt"):
        into.leave(
            "model",
            written,
            f"weights are not downloaded: model.weights: {written}, once the file is here",
        )
    data = into.take("data")
    into.put("dataset.name", "detection_files", "pictures with boxes")
    into.put("dataset.cameras", "pair" if both else "rgb", "ch: 6" if both else "one camera")
    if data:
        into.put("dataset.root", str(data), f"data: {data}")
    into.move("epochs", "train.epochs", float, default=100)
    translate_changes(into)
    translate_batch(into)
    translate_optimizer(into)
    amp = is_true(into.take("amp", default=True))
    into.put("precision.mode", "amp" if amp else "fp32", f"amp: {str(amp).lower()}")
    into.put("train.evaluate_every", "1 epoch", "it validates after each epoch")
    period = into.take("save_period", default=-1)
    into.put(
        "train.checkpoint_every",
        epochs(period) if period > 0 else "1 epoch",
        f"save_period: {period} (epochs)" if period > 0 else "it saves after each epoch",
    )
    patience = into.take("patience", default=100)
    if patience:
        into.put(
            "train.early_stopping.patience",
            int(patience),
            f"patience: {patience} epochs, one evaluation in each",
        )
    into.put(
        "train.ema", {"decay": 0.9999, "ramp_steps": 2000}, "it always evaluates such an average"
    )
    into.move_all(SIMPLE)
    into.leave_all(("task", "mode", "project", "save_dir", "exist_ok"), "mpt train, --runs DIR")
    into.leave_all(("device",), "--device, --nproc N")
    into.leave_all(("freeze",), "train.freeze: globs over the names of weights")
    into.leave_all(("warmup_epochs",), "optimizer.warmup: epochs x images / batch, in steps")


def translate_changes(into: Translation) -> None:
    """Take how pictures are changed by chance, and what is kept of the detections."""
    for name, (ours, usual) in CHANGES.items():
        into.move(name, f"dataset.{ours}", float, default=usual)
    closing, length = int(into.take("close_mosaic", default=10)), into.settings["train.epochs"][0]
    if closing > 0:
        into.put(
            "dataset.mosaic_epochs",
            max(0, int(length) - closing),
            f"close_mosaic: no mosaic in the last {closing} epochs",
        )
    given = into.take("multi_scale", default=0.0)
    spread = 0.5 if is_true(given) else float(given)
    if spread > 0:
        into.put("task.multi_scale", spread, f"multi_scale: {given}")
    into.move("conf", "task.confidence", float)
    into.move("iou", "task.iou", float, default=0.7)
    into.move("max_det", "task.most_detections", int)
    if is_true(into.take("agnostic_nms")):
        into.put("task.agnostic", True, "agnostic_nms: true")
    for name in TURNING:
        if not float(into.given.get(name) or 0):
            into.given.pop(name, None)
    into.leave_all(TURNING, "pictures are changed along their axes")


def translate_batch(into: Translation) -> None:
    """Take the batch; below 1 it is a share of the card's memory, and -1 asks for six tenths of it."""
    batch = into.take("batch", default=16)
    if 0 < batch < 1 or batch == -1:
        share = 0.6 if batch == -1 else batch
        into.leave(
            "batch",
            batch,
            f"{share:.0%} of the card: `mpt plan CONFIG --gpu auto --largest` finds the batch",
        )
        batch = 16
    batch, nominal = int(batch), into.take("nbs", default=NOMINAL)
    passes = max(1, round(nominal / batch))
    into.batch(batch, passes, ("batch", f"nbs / batch ({nominal} / {batch})"))
    decay = into.take("weight_decay", default=0.0005)
    # it decays as if the batch were the nominal one
    share = batch * passes / nominal
    scaled = f" x {batch * passes} / {nominal}" if share != 1 else ""
    into.put("optimizer.weight_decay", float(decay) * share, f"weight_decay: {decay}{scaled}")


def translate_optimizer(into: Translation) -> None:
    """Take SGD with its warm-up, or an Adam."""
    written = str(into.take("optimizer", default="auto"))
    momentum = into.take("momentum", default=0.937)
    if written.casefold() in ("auto", "sgd"):
        chosen = (
            "; auto takes what suits the number of iterations there" if written == "auto" else ""
        )
        into.put("optimizer.name", "sgd_warmup", f"optimizer: {written}{chosen}")
        into.put("optimizer.momentum", float(momentum), f"momentum: {momentum}")
    else:
        name = written.casefold()
        into.put("optimizer.name", name, f"optimizer: {written}")
        if name == "rmsprop":
            into.put("optimizer.momentum", float(momentum), f"momentum: {momentum}")
        else:
            into.put("optimizer.betas", [float(momentum), 0.999], f"momentum: {momentum}")
        into.put("optimizer.no_decay", ["bias", "norm"], "what does not decay there")
        into.leave_all(("lrf",), "the rate of this optimizer falls to 0 here")
    into.move("lr0", "optimizer.lr", float, default=0.01)
    into.put("optimizer.schedule", "cosine" if is_true(into.take("cos_lr")) else "linear", "cos_lr")
