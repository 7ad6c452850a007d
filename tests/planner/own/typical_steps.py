"""Training steps as scripts have them that choose their device in their first lines."""

import copy
import functools

import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def classifier(workers=0):
    """A loader, a network on the device of the script's first lines."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.rand(64, 3, 8, 8), torch.randint(10, (64,)))
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=workers, pin_memory=True)

    def step():
        images, labels = (one.to(device, non_blocking=True) for one in next(iter(loader)))
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def on_the_cpu():
    """A script without a GPU."""
    place = torch.device("cpu")
    model = nn.Linear(256, 256).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        model(torch.rand(8, 256, device="cpu")).sum().backward()
        optimizer.step()

    return step


def sampled():
    """Distributions check that their parameters and samples are possible ones."""
    coder = nn.Linear(64, 64).to(device)

    def step():
        mean, spread = coder(torch.rand(8, 64, device=device)).chunk(2, -1)
        found = Normal(mean, functional.softplus(spread))
        prior = Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=True)
        loss = kl_divergence(found, prior).sum() - prior.log_prob(found.rsample()).sum()
        loss.backward()

    return step


def stepped_between(foreach=None):
    """A loss whose weights were changed since its forward, which torch refuses."""
    maker, judge = nn.Linear(64, 64).to(device), nn.Linear(64, 1).to(device)
    first = torch.optim.Adam(judge.parameters(), foreach=foreach)
    second = torch.optim.Adam(maker.parameters(), foreach=foreach)

    def step():
        made = maker(torch.rand(8, 64, device=device))
        answer = judge(made)
        (-answer).mean().backward(retain_graph=True)
        first.step()
        answer.mean().backward()
        second.step()

    return step


def in_a_row(lines=""):
    """A network of layers in a row, with lines that a plan proposes."""
    layers = (one for _ in range(8) for one in (nn.Linear(256, 256), nn.GELU()))
    model = nn.Sequential(*layers).to(device)
    exec(lines, {"functools": functools, "torch": torch, "model": model})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.rand(4096, 256, device=device)).sum().backward()
        optimizer.step()

    return step


def shortened():
    """A network of whose parts one is kept, as the convolutions of a VGG."""
    whole = nn.Sequential(nn.Sequential(nn.Linear(64, 64)), nn.Linear(64, 4096)).to(device)
    features = nn.Sequential(*whole[0])
    features.others = [whole[0]]  # which has the same layers

    def step():
        features(torch.rand(8, 64, device=device)).sum().backward()

    return step


def lazily(is_lazy=True, first_in_step=False):
    """Layers that learn the shape of their input from it."""
    layers = (
        (nn.LazyConv2d(16, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(10))
        if is_lazy
        else (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 36, 10))
    )
    model = nn.Sequential(*layers).to(device)
    images = torch.rand(8, 3, 8, 8, device=device)
    if not first_in_step:
        model(images)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        model(images).sum().backward()
        optimizer.step()

    return step


def sharpened():
    """Weights that are put back from a copy (SAM)."""
    model = nn.Linear(256, 256).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        before = [one.data.clone() for one in model.parameters()]
        model(torch.rand(8, 256, device=device)).sum().backward()
        for one, old in zip(model.parameters(), before, strict=True):
            one.data = old
        optimizer.step()

    return step


def kept_in_files(folder="", to_host=False):
    """Checkpoints, which a plan neither writes nor misses."""
    path = f"{folder}/weights.pt"
    model = nn.Linear(64, 64).to(device)
    torch.save({"model": model.state_dict(), "epoch": 3}, path)
    place = (lambda storage, location: storage) if to_host else None
    found = torch.load(path, map_location=place)
    model.load_state_dict(found["model"])
    if "of_a_run" in folder:
        model.load_state_dict(torch.load(f"{folder}/true.pt", lambda storage, _: storage.cuda()))

    def step():
        loss = model(torch.rand(8, 64, device=device)).sum()
        loss.backward()
        print(f"{found['epoch']}: {loss:.3f}")
        torch.save(model, path)

    return step


def looks_where(is_compiled=True, length=256):
    """Flex attention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(
        lambda b, h, query, key: query >= key, None, None, length, length, device=device
    )
    attend = torch.compile(flex_attention) if is_compiled else flex_attention
    coder = nn.Linear(64, 3 * 64).to(device)

    def step():
        coded = coder(torch.rand(2, 4, length, 64, device=device))
        attend(*coded.chunk(3, -1), block_mask=mask).sum().backward()

    return step


def masks_blocks(is_compiled=True, length=4096):
    """A mask of blocks for flex attention that is made in each step."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    make = torch.compile(create_block_mask) if is_compiled else create_block_mask
    attend = torch.compile(flex_attention)
    coder = nn.Linear(64, 3 * 64).to(device)

    def step():
        mask = make(lambda b, h, query, key: query >= key, None, None, length, length, device)
        coded = coder(torch.rand(1, 4, length, 64, device=device))
        attend(*coded.chunk(3, -1), block_mask=mask).sum().backward()

    return step


def on_a_graph(edges=4096, nodes=2048, function="spmm"):
    """A graph convolution with a sparse adjacency matrix."""
    places = torch.randint(nodes, (2, edges))
    adjacency = torch.sparse_coo_tensor(places, torch.ones(edges), (nodes, nodes)).coalesce()
    adjacency = adjacency.to(device)
    coder = nn.Linear(64, 16).to(device)
    multiply = {"spmm": torch.spmm, "sparse": torch.sparse.mm, "matmul": torch.matmul}[function]

    def step():
        multiply(adjacency, coder(torch.rand(nodes, 64, device=device))).sum().backward()

    return step


def averaged(least=1.0):
    """A value that is never 0 in a run, unless it is taken so."""
    coder = nn.Linear(64, 16).to(device)

    def step():
        return 1 / float(coder(torch.rand(8, 64, device=device)).square().sum() * least)

    return step


class Crops(torch.utils.data.Dataset):
    """Random crops, whose size is a value."""

    def __len__(self):
        return 64

    def __getitem__(self, place):
        size = torch.empty(1).uniform_(0.5, 1.0).item()
        return torch.rand(3, 8, 8) * (1 / size), place % 10


def cropped():
    """Data that are made by chance, and a card's own timers."""
    loader = DataLoader(Crops(), batch_size=8, num_workers=2)
    model = nn.Linear(64, 64).to(device)

    def step():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.nvtx.range_push("step")
        images, _ = next(iter(loader))
        with torch.cuda.device(0):
            model(images.flatten(2).to(device)).sum().backward()
        torch.cuda.nvtx.range_pop()
        print(f"{start.elapsed_time(end):.1f} ms", torch.cuda.memory_summary())

    return step


def moved(how="to"):
    """Weights that a graph refers to or that have hooks, moved as a module, or one by one with their gradients."""
    model = nn.utils.weight_norm(nn.Linear(256, 256, bias=False)) if how == "normed" else None
    model = model or nn.Linear(256, 256, bias=False)
    seen = []
    model.register_parameter("scale", nn.Parameter(torch.ones(256)))
    model.scale.register_hook(seen.append)
    if how == "by_hand":
        model(torch.rand(8, 256)).sum().backward()
        for one in model.parameters():
            one.data = one.data.to(device)
            if one.grad is not None:
                one.grad.data = one.grad.data.to(device)
                assert one.grad.is_cuda
    model = model.to(device).to(device)
    assert next(model.parameters()).is_cuda
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        found = model(torch.rand(8, 256, device=device))
        model.to(device)  # where it is
        (found * model.scale).sum().backward()
        assert seen.pop().is_cuda
        optimizer.step()

    return step


def asked_without_gradients(is_inference=True, length=1024):
    """A network that is asked alone, with attention, and its answer read."""
    with torch.device(device):
        coder, norm = nn.Linear(64, 3 * 64), nn.RMSNorm(64)

    @torch.inference_mode(is_inference)
    @torch.no_grad()
    def step():
        coded = coder(norm(torch.rand(2, 4, length, 64, device=device)))
        found = functional.scaled_dot_product_attention(*coded.chunk(3, -1))
        print(f"{found.mean().item():.3f}", found.softmax(-1)[0, 0, 0].cpu().tolist())

    return step


def unrolled(times=4):
    """A recurrent cell that is called for each time, as decoders of speech have it."""
    cell = nn.GRUCell(32, 128).to(device)

    def step():
        state = torch.zeros(64, 128, device=device)
        for given in torch.rand(times, 64, 32, device=device):
            state = cell(given, state)
        state.square().sum().backward()

    return step


def fitted(history=10, line_search=None):
    """A picture fitted by LBFGS, as style transfer has it."""
    picture = torch.rand(3, 64, 64, device=device, requires_grad=True)
    options = {"max_iter": 4, "history_size": history, "line_search_fn": line_search}
    optimizer = torch.optim.LBFGS([picture], **options)

    def step():
        def evaluate():
            optimizer.zero_grad()
            loss = (picture * 2 - 1).square().sum()
            loss.backward()
            return loss

        return optimizer.step(evaluate)

    return step


class Average:
    """Moving averages of a network, in an object of their own."""

    def __init__(self, model, first_in_step):
        self.kept = None if first_in_step else copy.deepcopy(model)

    def follow(self, model):
        self.kept = self.kept or copy.deepcopy(model)
        for kept, now in zip(self.kept.parameters(), model.parameters(), strict=True):
            kept.data.lerp_(now.data, 0.1)


def followed(first_in_step=False):
    """A network, a copy that follows it, and states that are loaded after each step."""
    model = nn.Linear(256, 256, bias=False).to(device)
    average = Average(model, first_in_step)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        model(torch.rand(1024, 256, device=device)).sum().backward()
        optimizer.step()
        average.follow(model)
        torch.save(optimizer.state_dict(), "optimizer.pt")
        optimizer.load_state_dict(torch.load("optimizer.pt"))

    return step


def measured_in_double():
    """Switches that are set once the network is made."""
    model = nn.Sequential(nn.Conv2d(8, 64, 3), nn.Flatten(), nn.Linear(64 * 36, 64)).to(device)

    def step():
        torch.set_default_dtype(torch.float64)
        model(torch.rand(64, 8, 8, 8, device=device, dtype=torch.float32)).sum().backward()

    return step


def cut_out(size=None, largest=32):
    """A crop of a size and form that are drawn, as augmentations of pictures draw them; `size`: one that is not."""
    coder = nn.Conv2d(3, 16, 1).to(device)

    def step():
        images = torch.rand(4, 3, 64, 64, device=device)
        form = torch.exp(torch.empty(1).uniform_(0.5, 1.0)).item()
        side = size or int(torch.randint(8, largest + 1, (1,)).item() / form * form)
        place = torch.randint(0, 64 - side + 1, size=(1,)).item()
        coder(images[..., place : place + side, :side]).sum().backward()

    return step


class Levels(nn.Module):
    """A detector's head: it puts its results in the list that it is given."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(2))

    def forward(self, levels):
        for place, layer in enumerate(self.maps):
            levels[place] = layer(levels[place])
        return levels


def detector():
    """Layers in one list, the last of which takes a list of earlier results."""
    blocks = [nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU())]
    blocks += [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()) for _ in range(5)]
    model = nn.Module()
    model.layers = nn.ModuleList([*blocks, Levels()])
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        x, found = torch.rand(32, 3, 64, 64, device=device), []
        for layer in model.layers[:-1]:
            x = layer(x)
            found.append(x)
        levels = model.layers[-1]([found[2], found[-1]])
        optimizer.zero_grad()
        sum(level.square().mean() for level in levels).backward()
        optimizer.step()

    return step


class Refused(Exception):
    """A library's own error."""


def is_positive(condition):
    if not condition:
        raise Refused("must be positive")


def checked():
    """A library looks at what was drawn for an augmentation."""
    model = nn.Linear(64, 64).to(device)

    def step():
        strengths = torch.rand(8, 1, device=device)
        is_positive(bool((strengths >= 0).all()))
        model(strengths * torch.rand(8, 64, device=device)).sum().backward()

    return step
