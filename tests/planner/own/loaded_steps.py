"""Training steps whose weights libraries load and change: by threads, from files, as classes of their own."""

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

CODE = {}


class Eighths(nn.Parameter):
    """A weight that is kept in 8 bits with its scale, from the first move to the card on."""

    def __new__(cls, data, scale=None):
        self = torch.Tensor._make_subclass(cls, data, False)
        self.scale = scale
        return self

    def __deepcopy__(self, memo):
        return type(self)(self.data.clone(), self.scale)

    def cuda(self, device=None, non_blocking=False):
        return self.to("cuda", non_blocking=non_blocking)

    def to(self, *args, **kwargs):
        place = torch._C._nn._parse_to(*args, **kwargs)[0]
        if self.scale is None and place is not None:
            if "code" not in CODE:
                CODE["code"] = torch.linspace(-1, 1, 256).to(place)
            values = self.data.to(place)
            self.scale = values.abs().amax(1, keepdim=True) / CODE["code"].abs().max()
            self.data = (values / self.scale).to(torch.int8)
            return self
        return Eighths(super().to(*args, **kwargs), self.scale)


@functools.lru_cache(maxsize=2)
def places(count, device):
    """A library's table of places, made once."""
    return torch.arange(count, device=device)


def cached(function):
    """A library's decorator around a cache."""
    kept = functools.lru_cache(maxsize=2)(function)

    @functools.wraps(function)
    def wrapper(*args):
        return kept(*args)

    return wrapper


def memorized(function):
    """The same by a dictionary."""
    kept = {}

    def wrapper(*args):
        if args not in kept:
            kept[args] = function(*args)
        return kept[args]

    return wrapper


class Tables:
    """Tables that methods keep behind decorators."""

    @staticmethod
    @cached
    def anchors(count):
        return torch.rand(count, 64), torch.ones(count, 1)

    @classmethod
    @memorized
    def angles(cls, count):
        return torch.rand(count, 64)


def on_tables():
    """A layer on tables that are made in the first step."""
    layer = nn.Linear(64, 64)

    def step():
        layer.zero_grad()
        anchors, valid = Tables.anchors(1024)
        layer((anchors + Tables.angles(1024)) * valid).sum().backward()

    return step


class Noise(torch.Tensor):
    """Numbers that are drawn anew in place, as BigGAN has them."""

    def spread_by(self, deviation):
        self.deviation = deviation
        return self

    def draw(self):
        return self.normal_(0, self.deviation)

    def to(self, *args, **kwargs):
        moved = Noise(self).spread_by(self.deviation)
        moved.data = super().to(*args, **kwargs)
        return moved


class Layer(nn.Linear):
    """A layer with a weight in 8 bits."""

    def __init__(self, size):
        super().__init__(size, size, bias=False)
        self.weight = Eighths(self.weight.data)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.weight.scale).t()


def in_eighths():
    """Frozen weights in 8 bits beside trained ones."""
    model = nn.Sequential(Layer(256), nn.Linear(256, 256)).cuda().to("cuda")
    assert isinstance(model[0].weight, Eighths)
    assert isinstance(model[0].weight, nn.Parameter)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)

    def step():
        x = torch.rand(8, 256, device="cuda")
        loss = (model(x) + places(256, "cuda")).sum()
        loss.backward()
        optimizer.step()

    return step


def drawn_in_place():
    """A network that is trained on noise of a class of its own."""
    model = nn.Linear(256, 256).cuda()
    noise = Noise(torch.randn(1024, 256)).spread_by(0.5).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        noise.draw()
        optimizer.zero_grad()
        model(noise[:512]).square().mean().backward()
        optimizer.step()

    return step


def from_files(folder):
    """Weights of a file, each read by a thread and put on the card there."""
    path = Path(folder) / "weights.safetensors"
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).half()
    if not path.exists():
        raise FileNotFoundError(path)
    with safe_open(path, framework="pt", device="cpu") as file, ThreadPoolExecutor(2) as pool:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        jobs = {
            name: pool.submit(lambda one: one[...].to("cuda", torch.float32), one)
            for name, one in slices.items()
        }
        state = {name: job.result() for name, job in jobs.items()}
    model.load_state_dict(state, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.rand(8, 256, device="cuda")).sum().backward()
        optimizer.step()

    return step


def write_weights(folder):
    """Write the file of `from_files`."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).half()
    save_file(model.state_dict(), Path(folder) / "weights.safetensors")


def by_bitsandbytes(bits=4, device="cuda"):
    """Frozen weights of bitsandbytes with a trained low-rank product beside each, as QLoRA has them."""
    import bitsandbytes

    def layer():
        if bits == 4:
            return bitsandbytes.nn.Linear4bit(
                256, 256, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
        return bitsandbytes.nn.Linear8bitLt(
            256, 256, bias=False, has_fp16_weights=False, threshold=6.0
        )

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.down = layer(), nn.Linear(256, 8, bias=False)
            self.up = nn.Linear(8, 256, bias=False)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return x + self.frozen(x.bfloat16()).float() + self.up(self.down(x))

    model = nn.Sequential(Block(), Block(), Block()).to(device)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])

    def step():
        optimizer.zero_grad()
        model(torch.rand(64, 256, device=device)).sum().backward()
        optimizer.step()

    return step


def optimized(library, name, size=1024):
    """Two layers by an optimizer that keeps its state in fewer bits, or elsewhere."""
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size)).cuda()
    module = __import__(library, fromlist=["optim"]).optim
    if name == "CPUOffloadOptimizer":
        optimizer = module.CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        optimizer = getattr(module, name)(model.parameters(), lr=1e-3)

    def step():
        model(torch.rand(8, size, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compiled_update(product=False):
    """A weight that a compiled function changes: by elementwise operators, or by a product as well."""
    weight = torch.rand(1024, 1024, device="cuda", requires_grad=True)

    @torch.compile
    def change(weight, gradient):
        scaled = gradient * 2 + 1
        if product:
            scaled = scaled @ scaled
        weight.sub_(scaled.abs().sqrt() / scaled.amax(1, keepdim=True))

    def step():
        (weight * torch.rand(1024, 1, device="cuda")).sum().backward()
        with torch.no_grad():
            change(weight, weight.grad)
        weight.grad = None

    return step
