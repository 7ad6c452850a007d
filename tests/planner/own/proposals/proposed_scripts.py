"""Training scripts in the shapes in which people write them, for the changes that a plan proposes."""

from __future__ import annotations

DEVICE = 'torch.device("cuda" if torch.cuda.is_available() else "cpu")'
BLOCK = """
class Block(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, scale=1.0, *, mask=None):
        y = self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return x + scale * (y if mask is None else y * mask), y.mean()
"""
TORCH = "import torch\nfrom torch import nn\n"
NET = f"""{TORCH}{BLOCK}

class Net(nn.Module):
    def __init__(self, width=128, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        mask = torch.ones(x.shape[0], 1, 1, device=x.device)
        for layer in self.layers:
            x, _ = layer(x, 0.5, mask=mask)
        return self.head(x.mean(1))

"""
DATA = f"""
torch.manual_seed(0)
device = {DEVICE}
x, y = torch.rand(16, 32, 128, device=device), torch.randint(0, 10, (16,), device=device)
"""
PICTURES = f"""
torch.manual_seed(0)
device = {DEVICE}
x, y = torch.rand(4, 3, 32, 32, device=device), torch.randint(0, 10, (4,), device=device)
"""
LOOP = """
for step in range(3):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""
PLAIN = """
model = Net().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
"""
ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\ncriterion = nn.CrossEntropyLoss()\n"

IN_PAIRS = NET.replace(
    "Block(width) for _", "nn.ModuleList([Block(width), Block(width)]) for _"
).replace(
    """for layer in self.layers:
            x, _ = layer(x, 0.5, mask=mask)""",
    """for first, second in self.layers:
            x = first(x, 0.5, mask=mask)[0]
            x = second(x)[0]""",
)
SCRIPTS: dict[str, str] = {
    "plain": NET + DATA + PLAIN + LOOP,
    "in_pairs": IN_PAIRS + DATA + PLAIN + LOOP,
    "one_expression": NET
    + DATA
    + PLAIN
    + """
for step in range(3):
    optimizer.zero_grad(set_to_none=True)
    criterion(
        model(x), y
    ).backward()
    optimizer.step()
""",
    "main": NET
    + f"""
def make_optimizer(model, rate):
    return torch.optim.AdamW(
        [{{"params": model.layers.parameters(), "weight_decay": 0.1}}, {{"params": model.head.parameters()}}],
        lr=rate,
    )


def step_once(model, batch, optimizer, scheduler):
    x, y = batch
    logits = model(x)
    loss = nn.functional.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    device = {DEVICE}
    network = Net().to(device)
    optim = make_optimizer(network, 1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 4)
    block = 16
    for epoch in range(2):
        for _ in range(2):
            batch = torch.rand(block, 32, 128).to(device), torch.randint(0, 10, (block,)).to(device)
            step_once(network, batch, optim, scheduler)


if __name__ == "__main__":
    main()
""",
    "trainer_class": NET
    + f"""
class Trainer:
    def __init__(self, width=128):
        self.device = {DEVICE}
        self.model = Net(width).to(self.device)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def batches(self, count):
        for _ in range(count):
            yield torch.rand(16, 32, 128).to(self.device), torch.randint(0, 10, (16,)).to(self.device)

    def loss_of(self, x, y):
        return nn.functional.cross_entropy(self.model(x), y)

    def epoch(self):
        for x, y in self.batches(2):
            self.opt.zero_grad()
            loss = self.loss_of(x, y)
            loss.backward()
            self.opt.step()

    def run(self):
        for _ in range(2):
            self.epoch()


if __name__ == "__main__":
    torch.manual_seed(0)
    Trainer().run()
""",
    "folds": NET
    + DATA
    + """
criterion = nn.CrossEntropyLoss()
for fold in range(2):
    model = Net(depth=2).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
""",
    "accumulated": NET
    + DATA
    + PLAIN
    + """
for step in range(8):
    loss = criterion(model(x), y) / 4
    loss.backward()
    if (step + 1) % 4 == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
""",
    "scaled": NET
    + DATA
    + PLAIN
    + """
scaler = torch.amp.GradScaler("cuda", enabled=device.type == "cuda")
for step in range(3):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "followed": "import copy\n"
    + NET
    + DATA
    + PLAIN
    + """
average = copy.deepcopy(model).requires_grad_(False)
losses = []
for step in range(3):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mean, value in zip(average.parameters(), model.parameters()):
            mean.lerp_(value, 0.1)
    losses.append(loss.item())
    average.eval()
    with torch.no_grad():
        average(x)
""",
    "averaged": NET
    + DATA
    + PLAIN
    + """
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
for step in range(3):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    ema.update_parameters(model)
""",
    "data_parallel": NET + DATA + "model = nn.DataParallel(Net().to(device))\n" + ADAMW + LOOP,
    "compiled": NET
    + DATA
    + "model = torch.compile(Net().to(device), backend='eager')\n"
    + ADAMW
    + LOOP,
    "frozen": NET
    + DATA
    + """
model = Net(depth=6).to(device)
model.layers[:2].requires_grad_(False)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], foreach=False)
"""
    + LOOP,
    "sequential": TORCH
    + DATA.replace("torch.rand(16, 32, 128", "torch.rand(64, 128").replace("(16,)", "(64,)")
    + """
model = nn.Sequential(
    nn.Linear(128, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2),
    nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2),
    nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10),
).to(device)
"""
    + ADAMW
    + LOOP,
    "unet": TORCH
    + f"""

class Double(nn.Module):
    def __init__(self, one, other):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(one, other, 3, padding=1, bias=False), nn.BatchNorm2d(other), nn.ReLU(inplace=True),
            nn.Conv2d(other, other, 3, padding=1, bias=False), nn.BatchNorm2d(other), nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.body(x)


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inc = Double(3, width)
        self.down1, self.down2 = Double(width, 2 * width), Double(2 * width, 4 * width)
        self.up1, self.up2 = Double(6 * width, 2 * width), Double(3 * width, width)
        self.outc = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        a = self.inc(x)
        b = self.down1(nn.functional.max_pool2d(a, 2))
        c = self.down2(nn.functional.max_pool2d(b, 2))
        d = self.up1(torch.cat([nn.functional.interpolate(c, scale_factor=2), b], 1))
        return self.outc(self.up2(torch.cat([nn.functional.interpolate(d, scale_factor=2), a], 1)))


def train(net, device, epochs=2):
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        net.train()
        for _ in range(2):
            images = torch.rand(2, 3, 32, 32).to(device)
            masks = torch.randint(0, 2, (2, 32, 32)).to(device)
            predicted = net(images)
            loss = criterion(predicted, masks)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            net(images)


if __name__ == "__main__":
    torch.manual_seed(0)
    device = {DEVICE}
    net = UNet().to(device)
    train(net, device)
""",
    "gan": TORCH
    + DATA
    + """
def blocks(width, count):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.LeakyReLU(0.2)) for _ in range(count)))


generator = nn.Sequential(nn.Linear(16, 64), blocks(64, 4)).to(device)
critic = nn.Sequential(blocks(64, 3), nn.Linear(64, 1)).to(device)
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
real = torch.rand(32, 64, device=device)
for step in range(3):
    opt_d.zero_grad()
    fake = generator(torch.randn(32, 16, device=device))
    d_loss = bce(critic(real), torch.ones(32, 1, device=device))
    d_loss = d_loss + bce(critic(fake.detach()), torch.zeros(32, 1, device=device))
    d_loss.backward()
    opt_d.step()
    opt_g.zero_grad()
    g_loss = bce(critic(fake), torch.ones(32, 1, device=device))
    g_loss.backward()
    opt_g.step()
""",
    "optimizers_by_name": NET
    + DATA
    + """
criterion = nn.CrossEntropyLoss()
model, other = Net().to(device), Net(depth=2).to(device)


def make():
    return {
        "one": torch.optim.Adam(model.parameters(), lr=1e-3,
                                betas=(0.5, 0.999)),
        "two": torch.optim.AdamW(other.parameters()),
    }


optimizers = make()
for step in range(3):
    loss = criterion(model(x) + other(x), y)
    for one in optimizers.values():
        one.zero_grad()
    loss.backward()
    for one in optimizers.values():
        one.step()
""",
    "one_after_another": NET
    + DATA
    + """
criterion = nn.CrossEntropyLoss()
nets = [Net().to(device) for _ in range(2)]
optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-4) for net in nets]
for step in range(3):
    for net, optimizer in zip(nets, optimizers):
        optimizer.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        optimizer.step()
""",
    "eight_bits": "import bitsandbytes\n"
    + NET
    + DATA
    + PLAIN.replace("torch.optim.Adam(", "bitsandbytes.optim.Adam8bit(")
    + LOOP,
    "recomputed": NET.replace(
        "layer(x, 0.5, mask=mask)", "recompute(layer, x, 0.5, use_reentrant=False)"
    ).replace(TORCH, TORCH + "from torch.utils.checkpoint import checkpoint as recompute\n")
    + DATA
    + PLAIN
    + LOOP,
    "logged": NET
    + DATA
    + PLAIN
    + """
losses = []
for step in range(3):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss)
    accuracy = (model(x).argmax(1) == y).float().mean()
""",
    "factory": NET
    + f"""
def build(batch_size=8):
    torch.manual_seed(0)
    device = {DEVICE}
    net = Net().to(device)
    opt = torch.optim.AdamW(net.parameters())

    def step():
        x = torch.rand(batch_size, 32, 128, device=device)
        opt.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        opt.step()

    return step
""",
    "factory_of_four": NET
    + f"""
def one_step(model, optimizer, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def build(batch_size=8):
    torch.manual_seed(0)
    device = {DEVICE}
    network = Net().to(device)
    adam = torch.optim.Adam(network.parameters())
    return network, adam, torch.rand(batch_size, 32, 128, device=device), one_step
""",
    "factory_of_method": NET
    + f"""
class Runner:
    def __init__(self, size):
        device = {DEVICE}
        self.net = Net().to(device)
        self.opt = torch.optim.AdamW(self.net.parameters())
        self.x = torch.rand(size, 32, 128, device=device)

    def step(self):
        self.opt.zero_grad()
        loss = self.net(self.x).square().mean()
        loss.backward()
        self.opt.step()


def build(batch_size=8):
    torch.manual_seed(0)
    runner = Runner(batch_size)
    return runner.step
""",
}
"""Name -> text. One with a function `build` is planned by it."""
