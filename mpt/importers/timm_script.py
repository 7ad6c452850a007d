"""args.yaml, and the command line, of timm's training script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpt.importers.shared.translation import Translation, is_true

NAME = "timm's train.py"
OWN = (
    "opt",
    "sched",
    "drop_path",
    "model_ema",
    "warmup_epochs",
    "checkpoint_hist",
    "aa",
    "reprob",
    "data_dir",
)
OPTIMIZERS = {
    "sgd": "sgd",
    "momentum": "sgd",
    "nesterov": "sgd",
    "adam": "adam",
    "adamw": "adamw",
    "rmsprop": "rmsprop",
    "lion": "lion",
    "adamax": "adamax",
}
DROPS = {"drop": "drop_rate", "drop_path": "drop_path_rate", "drop_block": "drop_block_rate"}
"""Its options that it hands to the model, and the model's."""
SCALING = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
OF_MODEL = "of most models; by default there the model's own (pretrained_cfg)"
WARMUP_EPOCHS = 5
"""The script's default."""
SIMPLE = {
    "clip_grad": "optimizer.clip_grad_norm",
    "mixup": "task.mixup",
    "cutmix": "task.cutmix",
    "seed": "seed",
    "workers": "dataset.workers",
    "log_interval": "train.log_every",
    "checkpoint_hist": "train.keep_last",
    "initial_checkpoint": "model.weights",
    "experiment": "name",
}


def recognises(given: Mapping[str, Any], words: str) -> bool:
    """Return whether a model and two of the script's own settings are there."""
    return "model" in given and sum(name in given for name in OWN) >= 2


def translate(into: Translation) -> None:
    """Take model, data, batch, optimizer, schedule, precision, averages and mixing."""
    model = into.take("model")
    into.put("model.name", f"timm:{model}", f"model: {model}")
    drops = {ours: (name, rate) for name, ours in DROPS.items() if (rate := into.take(name))}
    if drops:
        options = {ours: float(rate) for ours, (_, rate) in drops.items()}
        into.put("model.options", options, ", ".join(name for name, _ in drops.values()))
    root = into.take("data_dir", "data", "dir")
    if root:
        into.put("dataset.name", "image_folder", "a folder with train/CLASS and val/CLASS")
        into.put("dataset.root", str(root), f"data_dir: {root}")
        share = into.take("crop_pct")
        into.put(
            "dataset.test_share", float(share or 0.875), f"crop_pct: {share}" if share else OF_MODEL
        )
        translate_pictures(into)
    else:
        into.move("img_size", "model.image_size", int)
    for name, usual in SCALING.items():
        given = into.take(name)
        into.put(
            f"task.{name}",
            usual if given is None else list(given),
            f"{name}: {given}" if given else OF_MODEL,
        )
    into.move("epochs", "train.epochs", float, default=300)
    per_pass, passes = (
        int(into.take("batch_size", "b", default=128)),
        int(into.take("grad_accum_steps", default=1)),
    )
    into.batch(per_pass, passes, ("batch_size", "grad_accum_steps"))
    into.put("train.evaluate_every", "1 epoch", "the script evaluates after each epoch")
    into.put("train.checkpoint_every", "1 epoch", "the script saves after each epoch")
    translate_optimizer(into)
    translate_rate(into, per_pass * passes)
    amp = is_true(into.take("amp"))
    half = str(into.take("amp_dtype", default="float16"))
    mode = ("bf16" if half == "bfloat16" else "amp") if amp else "fp32"
    into.put(
        "precision.mode", mode, f"amp: {str(amp).lower()}" + (f", amp_dtype: {half}" if amp else "")
    )
    if is_true(into.take("model_ema")):
        into.move("model_ema_decay", "train.ema.decay", float, default=0.9998)
        into.put("train.ema.ramp_steps", 0, "the decay is so from the first step on")
        into.put("train.ema.buffers", "average", "buffers are averaged too")
    if is_true(into.take("channels_last")):
        into.put("memory.channels_last", True, "channels_last: true")
    if is_true(into.take("grad_checkpointing")):
        into.put("memory.recompute", True, "grad_checkpointing: true")
    into.move("smoothing", "task.label_smoothing", float, default=0.1)
    if (mode := into.take("clip_mode", default="norm")) != "norm":
        into.leave_all(
            ("clip_grad",), f"clip_mode: {mode}; optimizer.clip_grad_norm clips the norm"
        )
    into.move_all(
        {
            name: path
            for name, path in SIMPLE.items()
            if into.given.get(name) not in (0, 0.0, "", None)
        }
    )
    into.leave_all(("pretrained",), "nothing is downloaded: model.weights: FILE")
    into.leave_all(("aa", "reprob"), "dataset.augment: torchvision's transforms by name")
    if not float(into.given.get("aug_repeats") or 0):
        into.given.pop("aug_repeats", None)
    into.leave_all(
        ("aug_repeats",),
        "repeated augmentation is not taken over: a picture comes once in an epoch here",
    )
    into.leave_all(("output",), "runs go to --runs DIR")


def translate_pictures(into: Translation) -> None:
    """Take the pictures' size, their changes by chance, and their mean and deviation."""
    side = into.take("img_size")
    size = int(side or 224)
    into.put("model.image_size", size, f"img_size: {side}" if side else OF_MODEL)
    cut: dict[str, Any] = {"size": size, "antialias": True}
    cut |= {name: found for name in ("scale", "ratio") if (found := into.take(name)) is not None}
    across, down = (
        float(into.take(name, default=usual)) for name, usual in (("hflip", 0.5), ("vflip", 0.0))
    )
    changes: list[Any] = [{"RandomResizedCrop": cut}]
    changes += [
        {kind: {"p": chance}}
        for kind, chance in (("RandomHorizontalFlip", across), ("RandomVerticalFlip", down))
        if chance
    ]
    jitter = float(into.given.get("color_jitter", 0.4) or 0)  # null is none
    into.given.pop("color_jitter", None)
    if jitter and not into.given.get("aa"):
        parts = ("brightness", "contrast", "saturation")
        changes.append({"ColorJitter": dict.fromkeys(parts, jitter)})
    into.put(
        "dataset.augment",
        changes,
        "scale, ratio, hflip, vflip, color_jitter without aa; bilinear here, or bicubic by chance there",
    )


def translate_rate(into: Translation, batch: int) -> None:
    """Take the rate; without one the script scales `lr_base` with the batch, by the root for Adam's relatives."""
    base, size = (
        float(into.take("lr_base", default=0.1)),
        int(into.take("lr_base_size", default=256)),
    )
    name = str(into.settings["optimizer.name"][0])
    scale = into.take("lr_base_scale") or ("sqrt" if "ada" in name or "lamb" in name else "linear")
    into.move("lr", "optimizer.lr", float)
    if "optimizer.lr" not in into.settings:
        share, root = batch / size, scale == "sqrt"
        rate = base * (share**0.5 if root else share)
        ratio = f"{'sqrt' if root else ''}({batch} / {size})"
        into.put(
            "optimizer.lr", rate, f"lr_base x batch / lr_base_size: {base:g} x {ratio} = {rate:g}"
        )
    into.move("weight_decay", "optimizer.weight_decay", float, default=2e-5)
    if into.settings.get("optimizer.weight_decay", (0.0, ""))[0]:
        into.put("optimizer.no_decay", ["bias", "vector"], "what does not decay there")


def translate_optimizer(into: Translation) -> None:
    """Take the optimizer and its schedule, whose warm-up is in epochs there."""
    written = str(into.take("opt", default="sgd"))
    name = OPTIMIZERS.get(written)
    into.put("optimizer.name", name or "sgd", f"opt: {written}")
    if name is None:
        into.leave("opt", written, "see `mpt list optimizers`")
    momentum = into.take("momentum", default=0.9)
    if name in ("sgd", "rmsprop"):
        into.put("optimizer.momentum", float(momentum), f"momentum: {momentum}")
    if name == "sgd":
        # theirs needs some too
        is_nesterov = written != "momentum" and float(momentum) > 0
        into.put("optimizer.nesterov", is_nesterov, f"opt: {written}")
    elif name == "rmsprop":
        into.put("optimizer.alpha", 0.9, "opt: rmsprop")
    if name in ("adam", "adamw", "adamax", "rmsprop"):
        into.move("opt_eps", "optimizer.eps", float)
    betas = into.take("opt_betas")
    if betas is not None and name in ("adam", "adamw", "lion"):
        into.put("optimizer.betas", betas, f"opt_betas: {betas}")
    schedule = str(into.take("sched", default="cosine"))
    on_updates = schedule == "none" or is_true(into.take("sched_on_updates"))
    on_epochs = "" if on_updates else ", which changes the rate after each epoch there"
    if schedule in ("cosine", "none"):
        into.put(
            "optimizer.schedule",
            "cosine" if schedule == "cosine" else "constant",
            f"sched: {schedule}{on_epochs}",
        )
    else:
        into.leave("sched", schedule, "schedules are constant, linear, cosine, one_cycle")
    written = into.take("warmup_epochs")
    epochs = WARMUP_EPOCHS if written is None and schedule == "cosine" else written
    if epochs:
        by_default = "there by default; " if written is None else ""
        into.leave(
            "warmup_epochs",
            epochs,
            f"{by_default}optimizer.warmup_steps: {epochs} x the steps of an epoch (images / batch)",
        )
