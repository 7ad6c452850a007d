"""Optimizers as training scripts have them: functions of a network that return those that step it."""

import torch
from torch import optim
from torch.optim import lr_scheduler


def simple(kind, **options):
    """Return the function that makes one optimizer of all trained weights."""
    return lambda model: [kind(trained(model), **options)]


def trained(model):
    return [weight for weight in model.parameters() if weight.requires_grad]


def in_groups(model):
    weights = trained(model)
    flat = [weight for weight in weights if weight.dim() < 2]
    wide = [weight for weight in weights if weight.dim() >= 2]
    groups = [{"params": wide, "weight_decay": 0.1}]
    if flat:
        groups.append({"params": flat, "weight_decay": 0.0, "lr": 1e-4})
    return [optim.AdamW(groups, lr=1e-3)]


def of_two_kinds(model):
    weights = trained(model)
    half = len(weights) // 2
    first = optim.SGD(weights[:half], lr=0.01, momentum=0.9)
    return [first, optim.Adam(weights[half:], lr=1e-3)]


def muon(model):
    flat = [weight for weight in trained(model) if weight.dim() != 2]
    wide = [weight for weight in trained(model) if weight.dim() == 2]
    found = [optim.Muon(wide, lr=1e-3)] if wide else []
    return [*found, *([optim.AdamW(flat, lr=1e-3)] if flat else [])]


def sparse_and_dense(model):
    sparse = [
        weight
        for module in model.modules()
        for weight in module.parameters(recurse=False)
        if getattr(module, "sparse", False)
    ]
    dense = [weight for weight in trained(model) if all(weight is not one for one in sparse)]
    return [*([optim.SparseAdam(sparse)] if sparse else []), optim.Adam(dense)]


def in_backward(model):
    """Each weight's optimizer steps in a hook of its gradient."""
    made = {weight: optim.AdamW([weight], lr=1e-3) for weight in trained(model)}

    def step(weight):
        made[weight].step()
        made[weight].zero_grad()

    for weight in made:
        weight.register_post_accumulate_grad_hook(step)
    return [*made.values()]


OPTIMIZERS = {
    "sgd": simple(optim.SGD, lr=0.01),
    "nesterov": simple(optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "sgd_for_loop": simple(optim.SGD, lr=0.01, momentum=0.9, foreach=False),
    "sgd_fused": simple(optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "adam": simple(optim.Adam),
    "adam_for_loop": simple(optim.Adam, foreach=False),
    "adamw_foreach": simple(optim.AdamW, foreach=True),
    "adamw_fused": simple(optim.AdamW, fused=True),
    "amsgrad": simple(optim.Adam, amsgrad=True),
    "capturable": simple(optim.AdamW, capturable=True),
    "tensor_rate": lambda model: [optim.Adam(trained(model), lr=torch.tensor(1e-3), foreach=False)],
    "rmsprop": simple(optim.RMSprop, centered=True, momentum=0.9),
    "adagrad": simple(optim.Adagrad),
    "adafactor": simple(optim.Adafactor),
    "lbfgs": simple(optim.LBFGS, max_iter=4, history_size=2, tolerance_change=-1),
    "line_search": simple(
        optim.LBFGS, max_iter=4, max_eval=40, history_size=2, line_search_fn="strong_wolfe"
    ),
    "rprop": simple(optim.Rprop),
    "asgd": simple(optim.ASGD),
    "nadam": simple(optim.NAdam),
    "radam": simple(optim.RAdam),
    "adamax": simple(optim.Adamax),
    "adadelta": simple(optim.Adadelta),
    "muon": muon,
    "in_groups": in_groups,
    "of_two_kinds": of_two_kinds,
    "sparse_and_dense": sparse_and_dense,
    "in_backward": in_backward,
}

SCHEDULES = {
    "none": lambda optimizer: None,
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "warm": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.StepLR(optimizer, 1)],
        [2],
    ),
    "function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 1e-2, total_steps=10, cycle_momentum=False
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "swa": lambda optimizer: optim.swa_utils.SWALR(optimizer, 1e-3, anneal_epochs=2),
}
