"""Training steps with parts as libraries have them: optimizers that read values, tricks that save memory."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 256


class OwnRate(torch.optim.Optimizer):
    """Finds its rate as Prodigy does: from a sum over all gradients, without which it leaves the update out."""

    def __init__(self, weights, keeps_start=True):
        super().__init__(weights, {"keeps_start": keeps_start})

    def step(self):
        weights = [one for group in self.param_groups for one in group["params"]]
        total = 0.0
        for one in weights:
            state = self.state[one]
            if not state:
                state["sum"] = torch.zeros_like(one.data)
                if self.defaults["keeps_start"] and one.any():
                    state["start"] = one.detach().clone()
            state["sum"].add_(one.grad)
            total += state["sum"].abs().sum().item()
        if total == 0:
            return
        for one in weights:
            if "average" not in self.state[one]:
                self.state[one]["average"] = torch.zeros_like(one.data)
            one.data.sub_(self.state[one]["average"].add_(one.grad), alpha=1 / total)


def with_own_rate(**options):
    """A network that such an optimizer updates."""
    model = nn.Linear(SIZE, SIZE, bias=False).to(device)
    optimizer = OwnRate(model.parameters(), **options)

    def step():
        optimizer.zero_grad()
        loss = model(torch.rand(8, SIZE, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        assert loss.item() == 0  # which is no optimizer's

    return step


class NamedState(torch.optim.SGD):
    """Keeps by a name what belongs to no parameter."""

    def step(self):
        self.state["norm"] = torch.stack(
            [one.grad.norm() for group in self.param_groups for one in group["params"]]
        )
        super().step()


def with_named_state():
    """A network with such an optimizer."""
    model = nn.Linear(SIZE, SIZE, bias=False).to(device)
    optimizer = NamedState(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        model(torch.rand(8, SIZE, device=device)).square().mean().backward()
        optimizer.step()

    return step


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer by a loss scale, as Accelerate's does."""

    def __init__(self, optimizer, scaler):
        self.optimizer, self.scaler = optimizer, scaler

    def step(self, closure=None):
        self.scaler.step(self.optimizer)
        self.scaler.update()


def wrapped():
    layer = nn.Linear(SIZE, SIZE, bias=False).cuda()
    scaler = torch.amp.GradScaler("cuda")
    optimizer = Wrapper(torch.optim.Adam(layer.parameters()), scaler)

    def step():
        layer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = layer(torch.rand(8, SIZE, device="cuda")).sum()
        scaler.scale(loss).backward()
        optimizer.step()

    return step


def summed_over(dimensions=4):
    """The dimensions of a sum are read from a tensor that the step makes, as MONAI's losses do."""
    model = nn.Conv2d(3, 8, 3).to(device)

    def step():
        found = model(torch.rand(2, 3, 32, 32, device=device))
        assert found.sum(torch.arange(2, dimensions).tolist()).shape == (2, 8)
        found.square().sum(torch.arange(2, dimensions).tolist()).mean().backward()

    return step


def in_any_order(batch=64):
    """All of three changes are made in an order that is drawn, one of which takes more memory than the others."""
    model = nn.Linear(SIZE, SIZE).to(device)

    def step():
        given = torch.rand(batch, SIZE, device=device)
        for place in torch.randperm(3):
            if place == 2:
                given = torch.stack([given] * 16).mean(0)
        model(given).sum().backward()

    return step


class Picture(torch.Tensor):
    """A tensor of a class of its own, as fastai's and torchvision's."""


class Attributes:
    """More than a tensor."""


class Described(Attributes, torch.Tensor):
    """A tensor with more, as MONAI's."""


def of_own_class(kind="Picture", batch=64):
    """A batch that is a tensor of a library's class."""
    model = nn.Linear(SIZE, SIZE).to(device)

    def step():
        given = torch.rand(batch, SIZE).as_subclass(globals()[kind]).to(device)
        model(given).square().sum().backward()

    return step


class Recurring(nn.Module):
    """Layers with places that are left out, as x-transformers has them."""

    def __init__(self, blocks):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(SIZE), None, None])
        self.layer = nn.Linear(SIZE, SIZE)
        made = [nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU()) for _ in range(blocks)]
        self.blocks = nn.ModuleList([*made[:3], None, *made[3:]])

    def forward(self, given):
        rows = self.layer(self.norms[0](given))
        for block in self.blocks:
            rows = rows if block is None else block(rows)
        return rows


def with_places_left_out(blocks=0):
    """A network that has such lists."""
    model = Recurring(blocks).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.rand(64 * SIZE, SIZE, device=device)).sum().backward()
        optimizer.step()

    return step
