"""The command line of torchvision's reference training of classifiers (references/classification/train.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpt.importers.shared.translation import Translation, is_true

NAME = "torchvision's references/classification"
OWN = (
    "data_path",
    "lr_scheduler",
    "lr_warmup_epochs",
    "lr_warmup_method",
    "lr_step_size",
    "lr_gamma",
    "auto_augment",
    "random_erase",
    "norm_weight_decay",
    "mixup_alpha",
    "cutmix_alpha",
    "train_crop_size",
    "val_crop_size",
    "val_resize_size",
    "ra_sampler",
    "model_ema_steps",
)
OTHERS = ("lr_steps", "aux_loss", "aspect_ratio_group_factor", "dataset")
"""Options of its scripts for detection and segmentation."""
MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SIMPLE = {
    "label_smoothing": "task.label_smoothing",
    "mixup_alpha": "task.mixup",
    "cutmix_alpha": "task.cutmix",
    "clip_grad_norm": "optimizer.clip_grad_norm",
    "print_freq": "train.log_every",
}


def recognises(given: Mapping[str, Any], words: str) -> bool:
    """Return whether a model and its data, or two of the script's own settings, are there."""
    own = sum(name in given for name in OWN)
    is_whole = "model" in given and "data_path" in given
    return (own >= 2 or is_whole) and not any(name in given for name in OTHERS)


def translate(into: Translation) -> None:
    """Take model, data, batch, optimizer, schedule, precision, averages and mixing."""
    model = into.take("model", default="resnet18")
    into.put("model.name", f"torchvision:{model}", f"model: {model}")
    into.put("dataset.name", "image_folder", "a folder with train/CLASS and val/CLASS")
    into.move("data_path", "dataset.root", str)
    translate_pictures(into)
    epochs = into.take("epochs", default=90)
    into.put("train.epochs", float(epochs), f"epochs: {epochs}")
    batch = int(into.take("batch_size", "b", default=32))
    devices = into.take("nproc_per_node", "nproc-per-node", "world_size", default=1)
    devices = int(devices) if str(devices).isdigit() else 1
    into.batch(batch, 1, ("batch_size", "", "nproc_per_node"), devices)
    into.put("train.evaluate_every", "1 epoch", "the script evaluates after each epoch")
    into.put("train.checkpoint_every", "1 epoch", "the script saves after each epoch")
    translate_optimizer(into)
    translate_schedule(into)
    amp = is_true(into.take("amp"))
    into.put("precision.mode", "amp" if amp else "fp32", f"amp: {str(amp).lower()}")
    translate_average(into, batch * devices, float(epochs))
    if is_true(into.take("sync_bn")):
        into.put("parallel.sync_batchnorm", True, "sync_bn: true")
    into.move("workers", "dataset.workers", int)
    given = {name: path for name, path in SIMPLE.items() if into.given.get(name) not in (0, 0.0)}
    into.move_all(given)
    for name in SIMPLE:
        into.given.pop(name, None)
    times = into.take("ra_reps", default=3)
    if is_true(into.take("ra_sampler")):
        into.leave(
            "ra_sampler",
            f"{times} times",
            "repeated augmentation is not taken over: a picture comes once in an epoch here",
        )
    into.leave_all(("pretrained", "weights"), "nothing is downloaded: model.weights: FILE")
    into.leave_all(("output_dir",), "runs go to --runs DIR")
    into.leave_all(("device",), "--device, --nproc N")


def translate_pictures(into: Translation) -> None:
    """Take the pictures' sizes, and their changes by chance."""
    size = int(into.take("train_crop_size", default=224))
    tested, resized = (
        int(into.take(name, default=usual))
        for name, usual in (("val_crop_size", 224), ("val_resize_size", 256))
    )
    into.put("model.image_size", size, f"train_crop_size: {size}")
    into.put("dataset.test_share", tested / resized, f"val: {tested} of {resized} pixels")
    if tested != size:
        into.leave(
            "val_crop_size", tested, f"pictures have one size here, {size}, in training and testing"
        )
    changes: list[Any] = [
        {"RandomResizedCrop": {"size": size, "antialias": True}},
        {"RandomHorizontalFlip": {"p": 0.5}},
    ]
    policy = into.take("auto_augment")
    magnitude, severity = (
        into.take("ra_magnitude", default=9),
        into.take("augmix_severity", default=3),
    )
    if policy == "ra":
        changes.append({"RandAugment": {"magnitude": int(magnitude)}})
    elif policy == "ta_wide":
        changes.append("TrivialAugmentWide")
    elif policy == "augmix":
        changes.append({"AugMix": {"severity": int(severity)}})
    elif policy == "imagenet":
        changes.append("AutoAugment")
    elif policy is not None:
        into.leave("auto_augment", policy, "dataset.augment: torchvision's transforms by name")
    if chance := float(into.take("random_erase", default=0.0)):
        # there it follows the division by the deviation, so that 0 is the mean
        changes.append({"RandomErasing": {"p": chance, "value": MEAN}})
    into.put("dataset.augment", changes, "crop, flip, auto_augment, random_erase")
    into.put("task.mean", MEAN, "the script's")
    into.put("task.std", DEVIATION, "the script's")


def translate_optimizer(into: Translation) -> None:
    """Take the optimizer, and which parameters decay."""
    written = str(into.take("opt", default="sgd")).casefold()
    name = "sgd" if written.startswith("sgd") else written
    into.put("optimizer.name", name, f"opt: {written}")
    into.move("lr", "optimizer.lr", float, default=0.1)
    momentum = float(into.take("momentum", default=0.9))
    if name in ("sgd", "rmsprop"):
        into.put("optimizer.momentum", momentum, f"momentum: {momentum:g}")
    if name == "sgd":
        into.put("optimizer.nesterov", "nesterov" in written, f"opt: {written}")
    elif name == "rmsprop":
        into.put("optimizer.alpha", 0.9, "opt: rmsprop")
        into.put("optimizer.eps", 0.0316, "opt: rmsprop")
    decay = float(into.take("weight_decay", "wd", default=1e-4))
    into.put("optimizer.weight_decay", decay, f"weight_decay: {decay:g}")
    free = []
    for kind in ("bias", "norm"):
        own = into.take(f"{kind}_weight_decay")
        if own == 0:
            free.append(kind)
        elif own is not None and float(own) != decay:
            into.leave(f"{kind}_weight_decay", own, "optimizer.parts: {GLOB: {weight_decay: ...}}")
    if free:
        into.put("optimizer.no_decay", free, "norm_weight_decay, bias_weight_decay: 0")


def translate_schedule(into: Translation) -> None:
    """Take the schedule; there the rate changes after each epoch, here after each step."""
    written = into.take("lr_scheduler")
    schedule = str(written or "steplr").casefold()
    by_default = "" if written else "there by default; "
    lowest = float(into.take("lr_min", default=0.0))
    if schedule == "cosineannealinglr":
        into.put("optimizer.schedule", "cosine", f"lr_scheduler: {written}")
    else:
        into.leave(
            "lr_scheduler",
            schedule,
            f"{by_default}schedules are constant, linear, cosine, one_cycle",
        )
    if lowest:
        into.leave("lr_min", lowest, "the rate falls to 0 here")
    epochs = into.take("lr_warmup_epochs", default=0)
    method, start = into.take("lr_warmup_method", default="constant"), into.take("lr_warmup_decay")
    if epochs:
        into.leave(
            "lr_warmup_epochs",
            epochs,
            f"optimizer.warmup_steps: {epochs} x images / batch; it is linear from 0 here, {method} from "
            f"{0.01 if start is None else start} of the rate there",
        )


def translate_average(into: Translation, batch: int, epochs: float) -> None:
    """Take the average, whose decay there depends on batch and length, and which follows every 32nd step."""
    every, decay = int(into.take("model_ema_steps", default=32)), into.take("model_ema_decay")
    if not is_true(into.take("model_ema")):
        return
    share = min(1.0, (1 - float(0.99998 if decay is None else decay)) * batch * every / epochs)
    into.put(
        "train.ema",
        {"decay": (1 - share) ** (1 / every), "ramp_steps": 0, "buffers": "average"},
        f"model_ema: there {1 - share:.6g} after every {every} steps, and a copy until a warm-up is over",
    )
