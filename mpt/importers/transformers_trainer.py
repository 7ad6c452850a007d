"""TrainingArguments of Hugging Face's Trainer: as JSON or YAML, or as the options of a script that takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpt.importers.shared.translation import Translation, is_true, show

NAME = "Hugging Face TrainingArguments"
OWN = (
    "per_device_train_batch_size",
    "num_train_epochs",
    "lr_scheduler_type",
    "eval_strategy",
    "save_total_limit",
)
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "rmsprop": "rmsprop",
    "lion_32bit": "lion",
}
SIMPLE = {
    "seed": "seed",
    "weight_decay": "optimizer.weight_decay",
    "label_smoothing_factor": "task.label_smoothing",
    "dataloader_num_workers": "dataset.workers",
    "save_total_limit": "train.keep_last",
    "run_name": "name",
}


def recognises(given: Mapping[str, Any], words: str) -> bool:
    """Return whether at least two of its own settings are there."""
    return sum(name in given for name in OWN) >= 2 or "per_device_train_batch_size" in given


def translate(into: Translation) -> None:
    """Take length, batch, optimizer, precision, periods and memory. What it leaves out has Transformers' default."""
    steps = into.take("max_steps", default=-1)
    if steps > 0:
        into.put("train.steps", int(steps), f"max_steps: {steps}")
        into.take("num_train_epochs")
    else:
        into.move("num_train_epochs", "train.epochs", float, default=3.0)
    per_pass = int(into.take("per_device_train_batch_size", default=8))
    passes = int(into.take("gradient_accumulation_steps", default=1))
    into.batch(per_pass, passes, ("per_device_train_batch_size", "gradient_accumulation_steps"))
    translate_optimizer(into, steps)
    translate_precision(into)
    logging = into.take("logging_steps")
    translate_period(into, "eval", "train.evaluate_every", steps, logging or 500)
    translate_period(into, "save", "train.checkpoint_every", steps, 500)
    if logging and logging >= 1:
        into.put("train.log_every", int(logging), f"logging_steps: {logging}")
    elif logging:
        into.leave("logging_steps", logging, "a share of the run: set train.log_every in steps")
    into.move_all(SIMPLE)
    if is_true(into.take("gradient_checkpointing")):
        into.put("memory.recompute", True, "gradient_checkpointing: true")
    if is_true(into.take("auto_find_batch_size")):
        into.put(
            "memory.on_oom",
            "adapt",
            "auto_find_batch_size: true; the batch stays, its parts become smaller",
        )
    if is_true(into.take("torch_compile")):
        into.put("memory.compile", True, "torch_compile: true")
    into.leave_all(("output_dir",), "runs go to --runs DIR")
    into.leave_all(("per_device_eval_batch_size",), "evaluations take train.batch_size")


def translate_optimizer(into: Translation, steps: int) -> None:
    """Take the optimizer, its rate and its schedule."""
    written = str(into.take("optim", default="adamw_torch"))
    name = OPTIMIZERS.get(written)
    if name is None and written.startswith(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")):
        name = "adamw"
        into.put("memory.low_bit_optimizer", True, f"optim: {written}")
    if name is None:
        into.leave("optim", written, "see `mpt list optimizers`")
    into.put("optimizer.name", name or "adamw", f"optim: {written}")
    into.move("learning_rate", "optimizer.lr", float, default=5e-5)
    betas = [
        float(into.take(f"adam_beta{number}", default=one))
        for number, one in ((1, 0.9), (2, 0.999))
    ]
    if name in ("adamw", "lion"):
        into.put("optimizer.betas", betas, f"adam_beta1, adam_beta2: {betas[0]}, {betas[1]}")
    if name == "adamw":
        into.move("adam_epsilon", "optimizer.eps", float)
        if "weight_decay" not in into.given:
            into.put("optimizer.weight_decay", 0.0, "weight_decay is 0 there by default")
    elif name == "sgd":
        into.put("optimizer.momentum", 0.0, "optim: sgd has none there by default")
    elif name == "adafactor":
        into.leave(
            "optim",
            written,
            "there a step has the rate's size, here the rate times the weights': choose optimizer.lr anew",
        )
    if into.given.get("weight_decay"):
        into.put("optimizer.no_decay", ["bias", "norm"], "what does not decay there")
    into.move(
        "max_grad_norm", "optimizer.clip_grad_norm", lambda value: float(value) or None, default=1.0
    )
    written = str(into.take("lr_scheduler_type", default="linear"))
    if written in SCHEDULES:
        into.put("optimizer.schedule", SCHEDULES[written], f"lr_scheduler_type: {written}")
    else:
        into.leave(
            "lr_scheduler_type", written, "schedules are constant, linear, cosine, one_cycle"
        )
    warmup, ratio = into.take("warmup_steps", default=0), into.take("warmup_ratio", default=0.0)
    if 0 < warmup < 1:  # since version 5
        warmup, ratio = 0, warmup
    if written == "constant" and (warmup or ratio):
        into.leave(
            "warmup_steps", warmup or ratio, "lr_scheduler_type: constant goes without one there"
        )
    elif warmup:
        into.put("optimizer.warmup_steps", int(warmup), f"warmup_steps: {warmup}")
    elif ratio and steps > 0:
        count = round(ratio * steps)
        into.put(
            "optimizer.warmup_steps",
            count,
            f"warmup_ratio x max_steps: {ratio} x {steps} = {count}",
        )
    elif ratio:
        into.leave(
            "warmup_ratio", ratio, f"set optimizer.warmup_steps: {show(ratio)} x the run's steps"
        )


def translate_precision(into: Translation) -> None:
    """Take the precision; without one of these settings Transformers trains in float32."""
    switches = {name: is_true(into.take(name)) for name in ("fp16", "bf16", "tf32")}
    modes = {"fp16": "amp", "bf16": "bf16", "tf32": "tf32"}
    on = next((name for name, value in switches.items() if value), None)
    if on is None:
        into.put("precision.mode", "fp32", "neither fp16 nor bf16 is on")
    else:
        into.put("precision.mode", modes[on], f"{on}: true")
    if on == "fp16":
        into.put("precision.dtype", "float16", "fp16: true")


def translate_period(into: Translation, what: str, path: str, steps: int, default: float) -> None:
    """Take how often something is done: per epoch, every that many steps, or by a share of the run; without a
    number it evaluates as often as it logs."""
    strategy = str(
        into.take(f"{what}_strategy", "evaluation_strategy" if what == "eval" else f"{what}_policy")
    )
    every = into.take(f"{what}_steps") or default
    if strategy == "epoch":
        into.put(path, "1 epoch", f"{what}_strategy: epoch")
    elif strategy == "steps" and every >= 1:
        into.put(path, int(every), f"{what}_strategy: steps, {what}_steps: {every}")
    elif strategy == "steps" and steps > 0:
        count = max(1, round(every * steps))
        into.put(path, count, f"{what}_steps x max_steps: {every} x {steps} = {count}")
    elif strategy == "steps":
        into.leave(f"{what}_steps", every, f"a share of the run: set {path} in steps or epochs")
    elif strategy == "no":
        into.put(path, 0, f"{what}_strategy: no; at the end only")
