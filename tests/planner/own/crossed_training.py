"""The parts of a training, and its losses."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.planner.own.crossed_networks import CLASSES, NETWORKS
from tests.planner.own.crossed_optimizers import OPTIMIZERS, SCHEDULES

BATCH = 4


def one_hot(labels, like):
    return functional.one_hot(labels, CLASSES).to(like.dtype)


def contrastive(found, labels):
    near = functional.normalize(found, dim=1)
    return functional.cross_entropy(
        near @ near.T / 0.1, torch.arange(len(labels), device=labels.device)
    )


def focal(found, labels):
    each = functional.cross_entropy(found.float(), labels, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


LOSSES = {
    "cross_entropy": functional.cross_entropy,
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0),
    "squares": lambda found, labels: functional.mse_loss(found, one_hot(labels, found)),
    "binary": lambda found, labels: functional.binary_cross_entropy_with_logits(
        found, one_hot(labels, found)
    ),
    "probability": lambda found, labels: functional.binary_cross_entropy(
        found.float().softmax(1), one_hot(labels, found).float()
    ),
    "margin": lambda found, labels: functional.soft_margin_loss(
        found, one_hot(labels, found) * 2 - 1
    ),
    "absolute": lambda found, labels: functional.l1_loss(found, one_hot(labels, found)),
    "outliers": lambda found, labels: functional.huber_loss(found, one_hot(labels, found)),
    "huber": lambda found, labels: functional.smooth_l1_loss(found, one_hot(labels, found)),
    "divergence": lambda found, labels: functional.kl_div(
        functional.log_softmax(found, 1), one_hot(labels, found).softmax(1), reduction="batchmean"
    ),
    "likelihood": lambda found, labels: functional.nll_loss(found.log_softmax(-1), labels),
    "angles": lambda found, labels: (
        1 - functional.cosine_similarity(found.float(), one_hot(labels, found).float()).mean()
    ),
    "triplets": lambda found, labels: functional.triplet_margin_loss(
        found, found.roll(1, 0), found.roll(2, 0)
    ),
    "contrastive": contrastive,
    "focal": focal,
    "gaussian": lambda found, labels: functional.gaussian_nll_loss(
        found, one_hot(labels, found), found.exp()
    ),
    "by_hand": lambda found, labels: (found - labels[:, None]).float().pow(2).sum() / len(labels),
}


class Training:
    """The parts of a training, and the sum of its updates."""

    def __init__(self, network, optimizer, precision, loss, data, schedule, device):
        self.device, self.precision, self.data = device, precision, data
        self.model, self.make = NETWORKS[network]()
        self.dtype = torch.get_default_dtype()
        if precision in ("bfloat16", "norms_in_float32"):
            self.model.to(torch.bfloat16)
            self.dtype = torch.bfloat16
        if precision == "norms_in_float32":
            for module in self.model.modules():
                if "Norm" in type(module).__name__:
                    module.float()
        if precision == "island":
            self.model[2].register_forward_pre_hook(lambda head, given: (given[0].float(),))
            head = self.model[2].forward
            self.model[2].forward = torch.autocast(device.type, enabled=False)(head)
        self.model.to(device)
        self.loss = LOSSES[loss]
        self.optimizers = OPTIMIZERS[optimizer](self.model)
        self.schedulers = [SCHEDULES[schedule](one) for one in self.optimizers]
        self.has_closure = optimizer in ("lbfgs", "line_search")
        self.in_backward = optimizer == "in_backward"
        self.scaler = torch.amp.GradScaler(
            device.type,
            init_scale=8,
            enabled=precision == "float16" and not (self.has_closure or self.in_backward),
        )
        self.kept = []
        self.loader = None

    def context(self):
        if self.precision in ("autocast", "island"):
            return torch.autocast(self.device.type, torch.bfloat16)
        if self.precision == "float16":
            return torch.autocast(self.device.type, torch.float16)
        return nullcontext()

    def batch(self):
        """Return inputs and labels on the device."""
        if self.data == "made":
            inputs = self.make(BATCH, device=self.device)
            labels = torch.randint(CLASSES, (BATCH,), device=self.device)
        elif self.data == "loaded":
            if self.loader is None:
                data = TensorDataset(self.make(2 * BATCH), torch.randint(CLASSES, (2 * BATCH,)))
                self.loader = DataLoader(data, BATCH, shuffle=True, drop_last=True)
            inputs, labels = (one.to(self.device) for one in next(iter(self.loader)))
        elif self.data == "pinned":
            inputs, labels = self.make(BATCH), torch.randint(CLASSES, (BATCH,))
            if torch.cuda.is_available():
                inputs, labels = inputs.pin_memory(), labels.pin_memory()
            inputs = inputs.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
        else:  # kept
            if not self.kept:
                made = self.make(BATCH).to(self.device), torch.randint(CLASSES, (BATCH,))
                self.kept.append((made[0], made[1].to(self.device)))
            inputs, labels = self.kept[0]
        return inputs.to(self.dtype) if inputs.is_floating_point() else inputs, labels

    def compute(self, model, inputs, labels):
        with self.context():
            return self.loss(model(inputs), labels)

    def backward(self, loss, **options):
        self.scaler.scale(loss).backward(**options)
