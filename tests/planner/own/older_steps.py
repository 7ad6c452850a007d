"""Training steps as older repositories have them, and what they do with values."""

import importlib

import numpy
import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def by_old_names(default=False):
    """Tensors made and converted by the classes of torch before 0.4."""
    if default:
        torch.set_default_tensor_type("torch.cuda.HalfTensor")
    make = torch.cuda.FloatTensor
    model = nn.Linear(256, 256).type(make)
    count = torch.arange(0, 4, out=torch.cuda.LongTensor(4))
    assert isinstance(count, torch.cuda.LongTensor)
    assert not isinstance(count, torch.LongTensor)

    def step():
        images = make(8, 256).fill_(1)
        assert images.type() == "torch.cuda.FloatTensor"
        assert images.cpu().type() != images.type()
        other = torch.ones(8, 256).type(images.type()) + torch.ones(256).type_as(images)
        (model(images) + other).sum().backward()
        if default:
            assert torch.zeros(3).dtype == torch.float16
            assert torch.zeros(3).is_cuda
            assert torch.Tensor(3).is_cuda
            assert torch.Tensor([1, 2]).dtype == torch.float16
            assert torch.Tensor([1, 2], device=images.device).is_cuda
            assert torch.Tensor(3, device="cuda").is_cuda

    return step


def counts(kind="host"):
    """Adam without a GPU, lengths that become a mask, and a device that a script asks torch for."""
    if kind == "host":
        place = torch.device("cpu")
    else:
        assert torch.accelerator.is_available()
        place = torch.accelerator.current_accelerator()
    model = nn.Linear(256, 256).to(place)
    optimizer = torch.optim.Adam(model.parameters())
    ready = torch.zeros(1, dtype=torch.bool, device=place)
    seen = []

    def step():
        optimizer.zero_grad()
        lengths = torch.LongTensor([12, 9]).to(place)
        longest = torch.max(lengths).item()
        mask = torch.arange(longest, device=place) < lengths.unsqueeze(1)
        if not ready.item():
            ready.fill_(True)
            seen.append(mask.shape)
        assert len(seen) == 1
        model(torch.rand(2, 12, 256).to(place)).masked_fill(~mask.unsqueeze(-1), 0).sum().backward()
        optimizer.step()

    return step


def in_parts():
    """Conditions that are asserted, slices at random places, packed sequences of lengths that are written out."""
    whole = torch.rand(4, 40, 16, device=device)
    layer = nn.LSTM(16, 8, batch_first=True).to(device)
    pack = nn.utils.rnn.pack_padded_sequence

    def step():
        noise = torch.rand(4, 40, 16, device=device)
        assert (noise >= 0).all(), "no noise"
        assert (noise >= 0).all().item()
        assert bool((noise <= 1).all()) and (noise > 0).any()  # noqa: PT018
        assert not torch.isnan(noise).any()
        if not (layer(noise)[0] >= -1).all() or (noise > 1).any():
            raise ValueError(f"no noise, but {noise.shape}")
        starts = torch.randint(30, (4,), device=device)
        parts = [one[start : start + 8] for one, start in zip(whole, starts, strict=True)]
        assert torch.stack(parts).shape == (4, 8, 16)
        lengths = [7, 5, 5, 3]
        times = torch.tensor([2, 3], device=device)
        assert torch.arange(2, device=device).repeat_interleave(times).shape == (5,)
        labels = pack(torch.randint(5, (4, 40), device=device), lengths, batch_first=True)[0]
        found = layer(pack(noise, lengths, batch_first=True))[0][0]
        assert len(labels) == 20
        assert found.shape == (20, 8)
        found.sum().backward()

    return step


def evaluated_first():
    """A recurrent layer that computes without gradients, and then the same with them."""
    layer = nn.LSTM(16, 8, batch_first=True).to(device)
    optimizer = torch.optim.Adam(layer.parameters())
    words = torch.rand(4, 40, 16, device=device)

    def step():
        with torch.no_grad():
            layer(words)
        layer(words)[0].sum().backward()
        optimizer.step()

    return step


def sentences(kind="LSTM", batch_first=True, layers=2):
    """A recurrent network on sentences of known lengths, whose words are chosen by the lengths that come back."""
    rnn = nn.utils.rnn
    net = getattr(nn, kind)(16, 32, layers, batch_first=batch_first, bidirectional=True).to(device)
    head = nn.Linear(64, 5).to(device)
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()])

    def step():
        parts = [torch.randn(length, 16, device=device) for length in (9, 20, 3, 15)]
        lengths = torch.tensor([len(part) for part in parts])
        given = rnn.pad_sequence(parts, batch_first=batch_first)
        packed = rnn.pack_padded_sequence(given, lengths, batch_first, enforce_sorted=False)
        found, back = rnn.pad_packed_sequence(net(packed)[0], batch_first, total_length=24)
        found = found if batch_first else found.transpose(0, 1)
        mask = torch.arange(24) < back[:, None]
        labels = torch.randint(0, 5, (int(back.sum()),), device=device)
        loss = nn.functional.cross_entropy(head(found[mask.to(device)]), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def masked_by_values():
    """A mask whose length is a value that is not known."""
    model = nn.Linear(16, 16).to(device)

    def step():
        lengths = torch.randint(1, 8, (4,), device=device)
        mask = torch.arange(lengths.max().item(), device=device) < lengths.unsqueeze(1)
        return model(torch.rand(4, 7, 16, device=device)) * mask.unsqueeze(-1)

    return step


def asserted():
    """Conditions that hold, as the step is built and in it."""
    model = nn.Linear(16, 16).to(device)
    if not (torch.rand(4, device=device) >= 0).all():
        raise ValueError("no noise")

    def step():
        found = model(torch.rand(4, 16, device=device))
        assert torch.isfinite(found).all()
        found.sum().backward()

    return step


def of_each_sample():
    """Gradients of each sample by itself, of a loss that divides by a length."""
    model = nn.Linear(64, 64).to(device)
    weights = {name: one.detach() for name, one in model.named_parameters()}

    def loss(weights, row, label):
        found = torch.func.functional_call(model, weights, (row[None],))
        return (found - label[None, None]).pow(2).sum() / len(label[None])

    def step():
        labels = torch.randint(0, 10, (8,), device=device)
        rows = torch.rand(8, 64, device=device)
        return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, rows, labels)

    return step


def masked_rows(by_mask=True):
    """Nine tenths of wide rows are left out, by a mask that the script fills or by their number."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).to(device)
    mask = torch.zeros(1000, dtype=torch.bool, device=device)
    mask[:900] = True

    def step():
        rows = torch.rand(1000, 512, device=device)
        model(rows[~mask] if by_mask else rows[900:]).sum().backward()

    return step


def placeholder():
    """A batch that the factory makes of zeros, which stands for one of labels."""
    labels = torch.zeros(64, dtype=torch.int64, device=device)
    model = nn.Linear(256, 256).to(device)

    def step():
        found = model(torch.rand(64, 256, device=device))[labels > 0]
        assert len(found) == 64
        found.sum().backward()

    return step


def by_type(folder=""):
    """A script that branches on the type of its device, and reads weights to it."""
    model = nn.Linear(256, 256).to(device)
    assert model.weight.device.type == device.type == "cuda"
    assert model.weight.device == torch.device("cuda:0") == torch.device("cuda", 0)
    model.load_state_dict(torch.load(f"{folder}/true.pt", map_location=device))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(device.type)
    generator = torch.Generator(device=device)

    def step():
        optimizer.zero_grad()
        with torch.autocast(device.type, enabled=device.type == "cuda"):
            found = model(torch.rand(8, 256, device=device, generator=generator))
            assert found.dtype == torch.float16
            loss = (found * torch.ones(256, device=found.device)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        with device:
            assert torch.zeros(2).get_device() == 0

    return step


def from_arrays():
    """A script for the CPU whose data are arrays, and that makes tensors of single values."""
    model = nn.Linear(16, 16)
    data = torch.from_numpy(numpy.random.rand(64, 16).astype("float32"))
    lengths = torch.LongTensor([5, 7])
    assert lengths.numpy().max() == 7

    def step():
        values = [one.sum() for one in model(data)[:8]]
        returns = torch.tensor(values)
        assert returns.dtype == torch.float32 and returns.shape == (8,)  # noqa: PT018
        assert torch.LongTensor([5, 7]).numpy().max() == 7
        (model(torch.Tensor(numpy.zeros((8, 16)))).sum(1) - returns).sum().backward()

    return step


def compiled(is_called=False, by_import=False):
    """A kernel that the script compiles, or torch's operators in its place."""
    from torch.utils.cpp_extension import load

    fused = load("fused", sources=["fused_kernel.cu"])
    if by_import:
        fused = importlib.import_module("fused")
    model = nn.Linear(256, 256).to(device)

    def step():
        found = model(torch.rand(8, 256, device=device))
        (fused.bias_act(found, 3) if is_called else found.relu()).sum().backward()

    return step


def registered():
    """A kernel that a library of C++ registers with torch."""
    from torch.utils.cpp_extension import load

    load("fused_bias", sources=["fused_bias.cu"], is_python_module=False)
    model = nn.Linear(256, 256).to(device)
    return lambda: (
        torch.ops.fused_bias.forward(model(torch.rand(8, 256, device=device))).sum().backward()
    )


KERNELS = {}


def compiled_once():
    """A kernel that is kept in a dictionary."""
    from torch.utils.cpp_extension import load

    if not KERNELS:
        KERNELS["fused"] = load("fused", sources=["fused_kernel.cu"])
    model = nn.Linear(256, 256).to(device)
    return lambda: (
        KERNELS["fused"].bias_act(model(torch.rand(8, 256, device=device)), 3).sum().backward()
    )


KERNEL = None


def compiled_if_possible():
    """A kernel of a library that keeps it, with torch's operators for those who cannot compile it."""
    from torch.utils.cpp_extension import load

    global KERNEL
    if KERNEL is None:
        try:
            load("fused", sources=["fused_kernel.cu"])
            KERNEL = importlib.import_module("fused")
        except (ImportError, RuntimeError):
            KERNEL = None
    model = nn.Linear(256, 256).to(device)

    def step():
        found = model(torch.rand(8, 256, device=device))
        (found.relu() if KERNEL is None else KERNEL.bias_act(found, 3)).sum().backward()

    return step


def compressed(layout="csr"):
    """A matrix in compressed rows, which torch can multiply with."""
    model = nn.Linear(8, 8).to(device)
    rows, columns, numbers = torch.arange(9), torch.arange(8), torch.rand(8)
    if layout == "csr":
        matrix = torch.sparse_csr_tensor(rows, columns, numbers, (8, 8)).to(device)
    else:
        matrix = torch.eye(8).to_sparse_csc().to(device)
    return lambda: (matrix @ model(torch.rand(8, 8, device=device))).sum().backward()


def compiled_network():
    """A network that torch is to compile."""
    model = torch.compile(nn.Sequential(nn.Linear(256, 256), nn.ReLU()).to(device))
    return lambda: model(torch.rand(8, 256, device=device)).sum().backward()


def with_borders(mode="reflect"):
    """Pictures whose channels lie last, blurred with borders of their own pixels: in order on a card."""
    kernel = torch.ones(1, 1, 3, 3, device=device, requires_grad=True)

    def step():
        pictures = torch.rand(2, 8, 8, 3, device=device).permute(0, 3, 1, 2)
        rows = nn.functional.pad(pictures, (1, 1, 1, 1), mode).view(6, 1, 10, 10)
        nn.functional.conv2d(rows, kernel).sum().backward()
        kernel.grad = None

    return step
