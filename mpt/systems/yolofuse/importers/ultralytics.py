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
WARMUP_EPOCHS = 3.0
"""Its default."""
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
    if network and network[1] == "yolo26":
        length = into.given.get("epochs") or 100
        into.put("task.one_to_many_epochs", int(length), f"epochs: {length}")
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
    if fusion is None and network is not None and network[1] != "yolo26":
        into.put("model.box_bias", 2.0, "since 8.4; 1 before")
        into.put("task.small_boxes", True, "since 8.4; false before")
    data = into.take("data")
    into.put("dataset.name", "detection_files", "pictures with boxes")
    into.put("dataset.cameras", "pair" if both else "rgb", "ch: 6" if both else "one camera")
    if data:
        into.put("dataset.root", str(data), f"data: {data}")
    into.move("epochs", "train.epochs", float, default=100)
    translate_changes(into)
    batch, passes, nominal = translate_batch(into)
    translate_optimizer(into, max(batch, nominal))
    translate_warmup(into, batch, passes)
    amp = is_true(into.take("amp", default=True))
    into.put("precision.mode", "amp" if amp else "fp32", f"amp: {str(amp).lower()}")
    into.put("train.evaluate_every", "1 epoch", "it validates after each epoch")
    period = into.take("save_period", default=-1)
    into.put(
        "train.checkpoint_every",
        epochs(period) if period > 0 else "1 epoch",
        f"save_period: {period} (epochs)" if period > 0 else "it saves after each epoch",
    )
    into.put("task.best_by", "map50_95", "its fitness; in earlier releases a tenth of it is mAP50")
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


def translate_batch(into: Translation) -> tuple[int, int, int]:
    """Take the batch and return it, the passes of an update, and the nominal batch.

    Below 1 it is a share of the card's memory, and -1 asks for six tenths of it.
    """
    batch = into.take("batch", default=16)
    if 0 < batch < 1 or batch == -1:
        share = 0.6 if batch == -1 else batch
        into.leave(
            "batch",
            batch,
            f"{share:.0%} of the card: `mpt plan CONFIG --gpu auto --largest` finds the batch",
        )
        batch = 16
    batch, nominal = int(batch), int(into.take("nbs", default=NOMINAL))
    passes = max(1, round(nominal / batch))
    into.batch(batch, passes, ("batch", f"nbs / batch ({nominal} / {batch})"))
    decay = into.take("weight_decay", default=0.0005)
    # it decays as if the batch were the nominal one
    share = batch * passes / nominal
    scaled = f" x {batch * passes} / {nominal}" if share != 1 else ""
    into.put("optimizer.weight_decay", float(decay) * share, f"weight_decay: {decay}{scaled}")
    return batch, passes, nominal


def translate_optimizer(into: Translation, update: int) -> None:
    """Take SGD, or an Adam. Without a name it is chosen by the number of updates, of `update` images each."""
    written = str(into.take("optimizer", default="auto"))
    momentum = into.take("momentum", default=0.937)
    if written.casefold() in ("auto", "sgd"):
        into.put("optimizer.name", "sgd_warmup", f"optimizer: {written}")
        into.put("optimizer.momentum", float(momentum), f"momentum: {momentum}")
        if written.casefold() == "auto":
            choose_optimizer(into, update)
    else:
        name = written.casefold()
        into.put("optimizer.name", name, f"optimizer: {written}")
        if name == "rmsprop":
            into.put("optimizer.momentum", float(momentum), f"momentum: {momentum}")
        else:
            into.put("optimizer.betas", [float(momentum), 0.999], f"momentum: {momentum}")
        into.put("optimizer.no_decay", ["bias", "norm"], "what does not decay there")
        into.put("optimizer.clip_grad_norm", 10.0, "it always clips at 10")
        into.leave_all(("lrf",), "the rate of this optimizer falls to 0 here")
    if "optimizer.lr" not in into.settings:
        into.move("lr0", "optimizer.lr", float, default=0.01)
    into.put("optimizer.schedule", "cosine" if is_true(into.take("cos_lr")) else "linear", "cos_lr")


def choose_optimizer(into: Translation, update: int) -> None:
    """Take `auto` as it is in a long training: it then goes past the rate that is given, and biases begin at 0."""
    into.leave_all(("lr0",), "optimizer: auto goes past it there")
    into.leave(
        "optimizer",
        "auto",
        f"SGD there (MuSGD since 8.4) if images / {update} x epochs exceeds 10,000. Else optimizer: {{name: adamw, lr: "
        f"0.002 x 5 / (4 + classes), betas: [0.9, 0.999]}}, without the settings of sgd_warmup",
    )
    into.put("optimizer.lr", 0.01, "optimizer: auto")
    into.given["warmup_bias_lr"] = 0.0


def translate_warmup(into: Translation, batch: int, passes: int) -> None:
    """Take the warm-up, whose length in steps depends on the number of images."""
    written = into.take("warmup_epochs")
    length = float(WARMUP_EPOCHS if written is None else written)
    is_sgd = into.settings["optimizer.name"][0] == "sgd_warmup"
    if is_sgd:
        into.move("warmup_momentum", "optimizer.warmup_momentum", float, default=0.8)
        into.move("warmup_bias_lr", "optimizer.warmup_bias_lr", float, default=0.1)
        if passes > 1:
            into.put(
                "optimizer.accumulation", passes, f"nbs / batch: {passes}, from 1 in the warm-up"
            )
    into.leave_all(
        ("warmup_momentum", "warmup_bias_lr"), "optimizer.warmup_steps warms up the rate alone"
    )
    name = "warmup" if is_sgd else "warmup_steps"
    if not length:
        into.put(f"optimizer.{name}", 0, "warmup_epochs: 0")
        return
    by_default = "there by default; " if written is None else ""
    unit = f"{batch}, in batches (before 8.4 at least 100)" if is_sgd else f"{batch * passes}"
    into.leave(
        "warmup_epochs", length, f"{by_default}optimizer.{name}: {length:g} x images / {unit}"
    )
