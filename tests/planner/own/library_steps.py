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
