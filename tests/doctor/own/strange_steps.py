"""Training steps with and without faults of precision, as people write them."""

import os

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Two layers; the first may overflow, and what follows divides that away."""

    def __init__(self, large=1.0):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 10)
        self.large = large
        with torch.no_grad():
            self.first.weight.mul_(large)

    def forward(self, x):
        return self.second(torch.relu(self.first(x) / self.large))


def trained(
    loss_of, large=1.0, scaled=True, dtype=torch.float16, weights=torch.float32, on=True, rate=0.01
):
    net = Net(large).cuda().to(weights)
    optimizer = torch.optim.AdamW(net.parameters(), rate)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)

    def step():
        x = torch.randn(16, 32, device="cuda", dtype=weights)
        labels = torch.randint(0, 10, (16,)).cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype, enabled=on):
            loss = loss_of(net, x, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return step


def entropy(net, x, labels):
    return functional.cross_entropy(net(x), labels)


def healthy(batch_size=16):
    return trained(entropy)


def recomputed():
    """What is recomputed in backward is computed by CUDA's lists as in forward."""
    return trained(
        lambda net, x, labels: checkpoint(lambda x: net(x).pow(2), x, use_reentrant=False).mean()
    )


def poor_loss(net, x, labels):
    share = torch.sigmoid(net(x) * 10 - 14)
    return -(share + 1e-8).log()[torch.arange(16), labels].mean()


def poor_logarithm():
    return trained(poor_loss)


def overflowing():
    return trained(lambda net, x, labels: net(x).square().mean(), large=1e5)


def unscaled():
    def loss(net, x, labels):
        return net(x).float().square().mean() * 1e-6

    return trained(loss, scaled=False)


def masked():
    def loss(net, x, labels):
        out = net(x)
        return out.masked_fill(out > 0.5, -1e9).softmax(1)[:, 0].mean()

    return trained(loss)


def in_float32():
    return trained(entropy, scaled=False, on=False)


def half_weights():
    return trained(entropy, scaled=False, on=False, weights=torch.bfloat16, rate=1e-6)


def unseeded():
    def loss(net, x, labels):
        return net(x * (1 + os.urandom(1)[0])).square().mean()

    return trained(loss)


def two_networks():
    maker, judge = nn.Linear(8, 32).cuda(), nn.Linear(32, 1).cuda()
    optimizers = [torch.optim.Adam(one.parameters()) for one in (judge, maker)]
    scaler = torch.amp.GradScaler("cuda")

    def step():
        with torch.autocast("cuda"):
            made = maker(torch.randn(16, 8).cuda())
            first = functional.softplus(judge(made.detach())).mean()
        scaler.scale(first).backward()
        scaler.step(optimizers[0])
        optimizers[1].zero_grad()
        with torch.autocast("cuda"):
            second = functional.softplus(-judge(made)).mean()
        scaler.scale(second).backward()
        scaler.step(optimizers[1])
        scaler.update()

    return step


def broken():
    net = nn.Linear(8, 8)

    def step():
        net(torch.randn(4, 9)).sum().backward()

    return step


def on_cards():
    """One of several processes that torchrun starts."""
    from torch import distributed  # here, so that the lines above stay those that the tests name

    distributed.init_process_group("nccl")
    wrapped = []

    def loss(net, x, labels):
        if not wrapped:
            wrapped.append(
                nn.parallel.DistributedDataParallel(net, device_ids=[distributed.get_rank()])
            )
        distributed.barrier()
        return functional.cross_entropy(wrapped[0](x), labels)

    return trained(loss)


def poor_logarithm_cured():
    def loss(net, x, labels):
        x = net(x) * 10 - 14
        share = torch.logaddexp(
            functional.logsigmoid(x), torch.tensor(10.0**-8, device=x.device).log()
        )
        return -share[torch.arange(16), labels].mean()

    return trained(loss)


def overflowing_cured():
    def loss(net, x, labels):
        with torch.autocast("cuda", enabled=False):
            first = net.first(x.float())
        return net.second(torch.relu(first / net.large)).square().mean()

    return trained(loss, large=1e5)


def unscaled_cured():
    return trained(lambda net, x, labels: net(x).float().square().mean() * 1e-6)


def masked_cured():
    def loss(net, x, labels):
        out = net(x)
        with torch.autocast("cuda", enabled=False):
            out = out.float()
            return out.masked_fill(out > 0.5, -1e9).softmax(1)[:, 0].mean()

    return trained(loss)


def known_twice():
    """A network and a part of it have names, and the loss scale is the doctor's."""
    net = Net().cuda()
    head = nn.ModuleList([net, net.second])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        loss = entropy(net, torch.randn(16, 32).cuda(), torch.randint(0, 10, (16,)).cuda())
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 0.1)
        optimizer.step()

    return step


def on_a_numbered_card():
    """Cards by their bare numbers, and autocast by the type of a tensor's device."""
    from concurrent import futures  # here, so that the lines above stay those that the tests name

    net = nn.DataParallel(Net().to(0), [0])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler()
    device = torch.device(0)
    with futures.ThreadPoolExecutor() as pool:
        moved = pool.submit(lambda: torch.zeros(1).to(device))
    assert moved.result().device.type == device.type == "cuda"

    def step():
        with torch.autocast(net.module.first.weight.device.type):
            loss = entropy(net, torch.randn(16, 32).to(0), torch.randint(0, 10, (16,)).to(device))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


class Chosen(nn.Module):
    """Takes the places of its samples, and their labels, as numbers with a point."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, batch):
        rows = self.net(batch["x"])[batch["places"].long()]
        return functional.cross_entropy(rows, batch["labels"].long())


def whole_numbers_as_floats():
    """Half holds them as they are: moved by rounding they would be other places."""
    net = Chosen().cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        batch = {
            "x": torch.randn(16, 32).cuda(),
            "places": torch.arange(1.0, 16.0).cuda(),
            "labels": torch.ones(15).cuda(),
        }
        net(batch).backward()
        optimizer.step()

    return step


def in_float32_with_a_look_at_half():
    def loss(net, x, labels):
        torch.zeros(1, dtype=torch.bfloat16)
        return entropy(net, x, labels)

    return trained(loss, scaled=False, on=False)


def refused_by_half_weights():
    def loss(net, x, labels):
        if x.dtype != torch.float32:
            raise TypeError("only float32 is known here")
        return entropy(net, x, labels)

    return trained(loss, scaled=False, on=False, weights=torch.bfloat16)
