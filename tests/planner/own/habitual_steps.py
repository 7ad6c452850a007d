"""Training steps with what many scripts do: kernels that they choose, experts, counts, records of their own."""

import contextlib

import torch
import torch.fx
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def attended(kernel="", switched_off=False, in_half=False, length=256):
    """Attention by the kernel that a script names, or without those that it switches off."""
    if switched_off:
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    layer = nn.Linear(64, 3 * 64).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        chosen = sdpa_kernel(getattr(SDPBackend, kernel)) if kernel else contextlib.nullcontext()
        with torch.autocast("cuda", torch.bfloat16, enabled=in_half), chosen:
            parts = layer(torch.rand(2, 4, length, 64, device=device)).chunk(3, -1)
            found = functional.scaled_dot_product_attention(*parts)
        found.float().sum().backward()
        optimizer.step()

    return step


def compared():
    """A step that compares whole tensors, and asserts that some are the same."""
    layer = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = layer.weight.detach().clone()

    def step():
        optimizer.zero_grad()
        rows = torch.rand(2, 64, device=device)
        assert torch.equal(rows, rows.flip(0).flip(0)), "rows"
        if not torch.allclose(rows.sum(1), rows.sum(1), atol=1e-3):
            raise ValueError("sums")
        layer(rows).sum().backward()
        optimizer.step()
        assert not torch.equal(before, layer.weight), "nothing was updated"
        assert not torch.equal(before, before[:1])
        print(torch.equal(before, layer.weight), torch.allclose(before, layer.weight))

    return step


COUNTED = {
    "bincount": lambda chosen, count: torch.bincount(chosen, minlength=count),
    "histc": lambda chosen, count: torch.histc(chosen.float(), count, 0, count - 1).long(),
    "one_hot": lambda chosen, count: functional.one_hot(chosen, count).sum(0),
    "scattered": lambda chosen, count: torch.zeros(
        count, dtype=torch.int64, device=device
    ).scatter_add_(0, chosen, torch.ones_like(chosen)),
}


def experts(way="bincount", tokens=64, count=4):
    """Tokens go to the experts that a gate chooses; those without tokens are left out."""
    gate = nn.Linear(64, count).to(device)
    parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(count)).to(device)
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)

    def shared_out(rows, chosen):
        order = chosen.argsort()
        counts = COUNTED[way](chosen, count)
        sizes = counts.tolist() if way == "bincount" else counts.cpu().numpy()
        found, start = [], 0
        for part, size in zip(parts, sizes):
            if size == 0:
                continue
            found.append(part(rows[order // 2][start : start + size]))
            start += size
        return torch.cat(found)[order.argsort()]

    def by_masks(rows, chosen):
        found = torch.zeros_like(rows)
        chosen = chosen.view(-1, 2)
        columns = functional.one_hot(chosen, count + 1).permute(2, 1, 0)
        numbers = torch.arange(count, device=device)[:, None, None]
        if way == "table":
            columns = numbers == chosen.T
        elif way == "eq":
            columns = chosen.T.eq(numbers)
        for number, part in enumerate(parts):
            if way in ("columns", "table", "eq"):
                row = torch.where(columns[number])[1]
                found.index_add_(0, row, part(rows[row]))
                continue
            mask = (chosen == number).any(-1) if way == "any" else chosen[:, 0] == number
            if mask.any():
                found[mask] = part(rows[mask])
        return found

    def step():
        optimizer.zero_grad()
        rows = torch.rand(tokens, 64, device=device)
        chosen = gate(rows).topk(2)[1].flatten()
        (shared_out if way in COUNTED else by_masks)(rows, chosen).sum().backward()
        optimizer.step()

    return step


def one_class(tokens=64):
    """Only the rows of one predicted class are used."""
    gate, part = nn.Linear(64, 4).to(device), nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD([*gate.parameters(), *part.parameters()], lr=0.1)

    def step():
        optimizer.zero_grad()
        rows = torch.rand(tokens, 64, device=device)
        part(rows[gate(rows).argmax(1) == 0]).sum().backward()
        optimizer.step()

    return step


def alike(tokens=64):
    """Pairs of rows of one predicted class."""
    gate, part = nn.Linear(64, 4).to(device), nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD([*gate.parameters(), *part.parameters()], lr=0.1)

    def step():
        optimizer.zero_grad()
        rows = torch.rand(tokens, 64, device=device)
        labels = gate(rows).argmax(1)
        pairs = torch.where(labels[:, None] == labels)
        part(rows)[pairs[0]].square().sum().backward()
        optimizer.step()

    return step


def in_groups(dtype="float32"):
    """Experts whose products are taken in groups of rows."""
    dtype = getattr(torch, dtype)
    weights = nn.Parameter(torch.rand(4, 64, 128, device=device, dtype=dtype))
    optimizer = torch.optim.SGD([weights], lr=0.1)

    def step():
        optimizer.zero_grad()
        rows = torch.rand(256, 64, device=device, dtype=dtype)
        chosen = rows.sum(1).long() % 4
        ends = torch.bincount(chosen, minlength=4).cumsum(0).int()
        functional.grouped_mm(rows, weights, offs=ends).sum().backward()
        optimizer.step()

    return step


def drawn_anew():
    """Numbers that are drawn until none is out of bounds."""
    layer = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        rows = torch.randn(2, 64, device=device)
        while (rows > 3).any():
            rows = torch.where(rows > 3, torch.randn_like(rows), rows)
        layer(rows).sum().backward()
        optimizer.step()

    return step


def collected(kept="features", rows=256):
    """A step that keeps what it computed for later, or the first batch, or the last one alone."""
    layer = nn.Linear(256, 256).to(device)
    optimizer = torch.optim.Adam(layer.parameters())
    features, losses, last = [], [], {}

    def step():
        optimizer.zero_grad()
        given = torch.rand(rows, 256, device=device)
        found = layer(given).relu()
        loss = found.sum()
        loss.backward()
        optimizer.step()
        losses.append(loss)
        if kept == "features":
            features.append(found)
        elif kept == "average" and not last:
            last["average"] = [one.detach().clone() for one in layer.parameters()]
        else:
            last["found"] = found.detach()

    return step


def sized_by_the_card(batch=64):
    """A script that looks at what it holds on the card, and divides by it."""
    layer = nn.Linear(256, 256).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    assert torch.cuda.memory_allocated() == 4 * (256 * 256 + 256)
    free, total = torch.cuda.mem_get_info()
    assert free == total - torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer(torch.rand(2, 256, device=device)).sum().backward()
    print(torch.cuda.max_memory_allocated() / torch.cuda.max_memory_reserved())
    each = (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) / 2
    assert free / each > 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] > 2 * 256 * 256

    def step():
        optimizer.zero_grad()
        layer(torch.rand(batch, 256, device=device)).sum().backward()
        optimizer.step()

    return step


def given_back(is_given_back):
    """What is freed before the first step leaves the cache, in which the step's tensors find too little room."""
    layer = nn.Linear(8, 8).to(device)
    freed = torch.zeros(16 * 2**20, device=device)
    del freed
    if is_given_back:
        torch.cuda.empty_cache()

    def step():
        first, second = (torch.zeros(10 * 2**20, device=device) for _ in range(2))
        layer((first + second)[:8]).sum().backward()

    return step


def shared_out(reads=True):
    """Weights that are shared out over two cards, and read from a whole copy on each."""
    from torch.distributed import device_mesh, fsdp
    from torch.distributed.tensor import distribute_tensor

    torch.use_deterministic_algorithms(True)  # memory that nothing was written to is no zeros
    torch.distributed.init_process_group("nccl")
    mesh = device_mesh.init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    layer = nn.Linear(256, 256)
    fsdp.fully_shard(layer, mesh=mesh)
    if reads:
        assert mesh.get_coordinate() == (0,)
        whole = {
            name: torch.rand(one.shape, device="cuda") for name, one in layer.named_parameters()
        }
        for name, weight in layer.named_parameters():
            with torch.no_grad():
                weight.copy_(distribute_tensor(whole[name], mesh, weight.placements))
        del whole
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        layer(torch.rand(64, 256, device="cuda")).sum().backward()
        optimizer.step()

    return step


def of_several_lengths():
    """Rows of different lengths in one nested tensor."""
    layer = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        rows = [torch.rand(count, 64) for count in (3, 5)]
        nested = torch.nested.nested_tensor(rows, device=device)
        layer(nested).values().sum().backward()
        optimizer.step()

    return step


def parked(between=True):
    """A weight that is on the host between its forward and its backward pass, and while another one computes."""
    first, second = (nn.Linear(512, 512, bias=False).cuda() for _ in range(2))
    weight = first.weight

    def step():
        hidden = first(torch.rand(8, 512, device=device))
        held = weight.data
        if between:
            weight.data = held.cpu()
        loss = second(hidden).sum()
        if between:
            weight.data = held
        loss.backward()
        assert weight.grad.is_cuda
        weight.data = weight.data.cpu()
        assert weight.grad.is_cuda  # which does not follow
        weight.data = held
        weight.data.sub_(weight.grad)
        weight.grad = None

    return step


def emptied(gives_back=True):
    """A tensor whose memory is given back while it lives, and asked for again."""
    kept = torch.empty(1 << 18, device=device)

    def step():
        memory = kept.untyped_storage()
        size = memory.size()
        if gives_back:
            memory.resize_(0)
        other = torch.ones(1 << 20, device=device)
        del other
        memory.resize_(size)
        torch.nn.functional.relu_(kept)

    return step


def told_apart():
    """A step that updates those of its weights that it knows by their addresses, tied ones once."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)).cuda()
    model.append(nn.Linear(256, 256, bias=False))
    model[2].weight = model[0].weight
    by_address = {one.data_ptr(): one for one in model.state_dict(keep_vars=True).values()}
    by_memory = {one.untyped_storage().data_ptr() for one in by_address.values()}
    assert len(by_address) == len(by_memory) == 2
    rows = model[0].weight.data[1:]
    assert rows.data_ptr() - model[0].weight.data_ptr() == 256 * 4
    optimizer = torch.optim.AdamW(by_address.values())

    def step():
        optimizer.zero_grad()
        model(torch.rand(8, 256, device=device)).sum().backward()
        optimizer.step()

    return step


def fitted(rows=256):
    """Coefficients that are fitted by least squares as the step is built, and without them if that fails."""
    try:
        found = torch.linalg.lstsq(torch.rand(8, rows, 64).cuda(), torch.rand(8, rows, 32).cuda())
        weight = found.solution.detach().requires_grad_()
    except Exception:
        weight = torch.zeros(1, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step():
        optimizer.zero_grad()
        (torch.rand(8, rows, 64, device=device) @ weight).sum().backward()
        optimizer.step()

    return step


class Spread(nn.Module):
    """Two parts of one shape."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, rows):
        found = torch.broadcast_tensors(self.first(rows), self.second(rows))
        return found[0] * found[1]


def trained(model):
    """Return the step of a network of 64 inputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.rand(8, 64, device=device)).sum().backward()
        optimizer.step()

    return step


def traced():
    """A network that torch.fx wrote anew, from placeholders."""
    return trained(torch.fx.symbolic_trace(Spread()).to(device))


class Scaled(nn.Module):
    """A layer with a temperature, which is one number without dimensions."""

    def __init__(self, dimensions):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.temperature = nn.Parameter(torch.ones(dimensions) * 2.6)

    def forward(self, rows):
        return self.layer(rows) * self.temperature.exp()


def scaled(dimensions=()):
    """A network with weights of so many dimensions that moves to the card."""
    return trained(Scaled(dimensions).to(device))


def summed(in_half=False, attends=False, rows=65536):
    """Messages that are summed into float32 zeros, which autocast breaks, or attention to keys in float32."""
    layers = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).to(device)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        half = torch.autocast("cuda", torch.bfloat16) if in_half else contextlib.nullcontext()
        with half:
            messages = layers(torch.randn(rows, 256, device=device))
            if attends:
                keys = torch.randn(1, 4, rows, 64, device=device)
                query = messages.view(1, 4, rows, 64)
                with torch.autocast("cuda", enabled=False):
                    found = functional.scaled_dot_product_attention(query, keys, keys)
            else:
                places = torch.arange(rows, device=device) // 8
                found = torch.zeros(rows // 8, 256, device=device).index_add_(0, places, messages)
        found.float().square().mean().backward()
        optimizer.step()

    return step
