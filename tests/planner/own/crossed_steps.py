"""Training steps of all kinds: any network with any optimizer, precision, trick, loss, and so on.

`build` makes one in plain PyTorch, as a script has it that chooses its device. `DIMENSIONS` names the values of each
argument, the plainest first.
"""

import copy
import io

import torch
from torch import nn
from torch.optim import swa_utils

from tests.planner.own.crossed_networks import NETWORKS
from tests.planner.own.crossed_optimizers import OPTIMIZERS, SCHEDULES, trained
from tests.planner.own.crossed_training import LOSSES, Training
from tests.planner.own.crossed_tricks import TRICKS


def evaluate(own, loss):
    own.model.eval()
    with torch.no_grad():
        found = own.compute(own.model, *own.batch())
        print(f"{found.item():.3f}")
    own.model.train()


@torch.inference_mode()
def infer(own, loss):
    own.model.eval()
    inputs, labels = own.batch()
    with own.context():
        found = own.model(inputs)
    right = (found.argmax(-1) == labels).float().mean()
    print(right.item(), found.float().softmax(-1).cpu().tolist()[0][0])
    own.model.train()


@torch.no_grad()
def follow(own, loss):
    if not hasattr(own, "follower"):
        own.follower = copy.deepcopy(own.model).eval().requires_grad_(False)
    for kept, now in zip(own.follower.parameters(), own.model.parameters()):
        kept.lerp_(now, 0.1)
    for kept, now in zip(own.follower.buffers(), own.model.buffers()):
        kept.copy_(now)


def average(own, loss):
    if not hasattr(own, "mean"):
        own.mean = swa_utils.AveragedModel(own.model)
    own.mean.update_parameters(own.model)


def average_quickly(own, loss):
    if not hasattr(own, "mean"):
        decay = swa_utils.get_ema_multi_avg_fn(0.9)
        own.mean = swa_utils.AveragedModel(own.model, multi_avg_fn=decay, use_buffers=True)
    own.mean.update_parameters(own.model)


def copy_all(own, loss):
    other = copy.deepcopy(own.model)
    assert len([*other.parameters()]) == len([*own.model.parameters()])
    own.best = copy.deepcopy(own.model.state_dict())


def save(own, loss):
    file = io.BytesIO()
    optimizers = [one.state_dict() for one in own.optimizers]
    torch.save({"model": own.model.state_dict(), "optimizers": optimizers}, file)
    file.seek(0)
    found = torch.load(file, map_location="cpu")
    own.model.load_state_dict(found["model"])
    for one, state in zip(own.optimizers, found["optimizers"]):
        one.load_state_dict(state)


def hand_over(own, loss):
    own.model.load_state_dict({name: one.clone() for name, one in own.model.state_dict().items()})
    for one in own.optimizers:
        one.load_state_dict(one.state_dict())


def keep_losses(own, loss):
    own.kept_losses = [*getattr(own, "kept_losses", []), loss]


def sum_losses(own, loss):
    if loss is not None:
        own.total = getattr(own, "total", 0) + loss


def note_norms(own, loss):
    norms = [weight.grad.norm() for weight in trained(own.model) if weight.grad is not None]
    if norms:
        print(torch.stack(norms).mean().item(), max(norm.item() for norm in norms))


def to_host_and_back(own, loss):
    own.model.cpu()
    own.model.to(own.device)


AFTERWARDS = {
    "nothing": lambda own, loss: None,
    "evaluate": evaluate,
    "infer": infer,
    "follow": follow,
    "average": average,
    "average_quickly": average_quickly,
    "copy_all": copy_all,
    "save": save,
    "hand_over": hand_over,
    "keep_losses": keep_losses,
    "sum_losses": sum_losses,
    "note_norms": note_norms,
    "to_host_and_back": to_host_and_back,
}


@torch.no_grad()
def clip_by_hand(weights):
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    total = sum(gradient.detach().float().pow(2).sum() for gradient in gradients) ** 0.5
    scale = (1.0 / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))


CLIPS = {
    "none": lambda weights: None,
    "norm": lambda weights: nn.utils.clip_grad_norm_(weights, 1.0),
    "norm_for_loop": lambda weights: nn.utils.clip_grad_norm_(weights, 1.0, foreach=False),
    "largest": lambda weights: nn.utils.clip_grad_norm_(
        weights, 1.0, norm_type="inf", error_if_nonfinite=True
    ),
    "value": lambda weights: nn.utils.clip_grad_value_(weights, 0.5),
    "by_hand": clip_by_hand,
}


def forget(own):
    for weight in own.model.parameters():
        weight.grad = None


def zero_all(own, **options):
    for one in own.optimizers:
        one.zero_grad(**options)


ZEROS = {
    "to_none": zero_all,
    "in_place": lambda own: zero_all(own, set_to_none=False),
    "by_model": lambda own: own.model.zero_grad(),
    "by_hand": forget,
}

DIMENSIONS = {
    "network": [*NETWORKS],
    "optimizer": [*OPTIMIZERS],
    "trick": [*TRICKS],
    "loss": [*LOSSES],
    "afterwards": [*AFTERWARDS],
    "precision": [
        *("float32", "autocast", "float16", "bfloat16", "norms_in_float32", "island"),
        *("default_bfloat16", "float64"),
    ],
    "schedule": [*SCHEDULES],
    "clip": [*CLIPS],
    "zeros": [*ZEROS],
    "data": ["made", "loaded", "pinned", "kept"],
}


def build(
    network="mlp",
    optimizer="sgd",
    trick="plain",
    loss="cross_entropy",
    afterwards="nothing",
    precision="float32",
    schedule="none",
    clip="none",
    zeros="to_none",
    data="made",
    device="cuda",
):
    """Return a step; its attribute `own` has the training's parts."""
    torch.manual_seed(0)
    default = {"default_bfloat16": torch.bfloat16, "float64": torch.float64}
    torch.set_default_dtype(default.get(precision, torch.float32))
    own = Training(network, optimizer, precision, loss, data, schedule, torch.device(device))
    clips, clear, after, produce = CLIPS[clip], ZEROS[zeros], AFTERWARDS[afterwards], TRICKS[trick]

    def compute():
        clear(own)
        return produce(own)

    def step():
        if own.has_closure:
            found = own.optimizers[0].step(compute)
        elif own.in_backward:
            found = produce(own)
        else:
            found = compute()
            for one in own.optimizers:
                own.scaler.unscale_(one)
            clips(trained(own.model))
            for one in own.optimizers:
                own.scaler.step(one)
            own.scaler.update()
        for one in own.schedulers:
            if schedule == "plateau":
                one.step(0.5)
            elif one is not None:
                one.step()
        after(own, found)

    step.own = own
    return step
