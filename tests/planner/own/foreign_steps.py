"""Training steps that know nothing of mpt, as people write them."""

import copy
import functools
import itertools
import sys

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Attention and the wide part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        x = x + self.out(
            functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        )
        return x + self.wide(x)


class Decoder(nn.Module):
    """A small language model."""

    def __init__(self, width=128, layers=3, words=100):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def decoder(batch_size=4, length=128, names_cuda=False, autocast=False):
    """A loop body as a closure: clipping, a moving average, a check of the loss, a line that is printed."""
    device = torch.device("cuda" if names_cuda and torch.cuda.is_available() else "cpu")
    model = Decoder().to(device)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=autocast)

    def step():
        ids = torch.randint(0, 100, (batch_size, length + 1)).to(device)
        optimizer.zero_grad()
        with (
            torch.autocast(device.type, torch.float16, enabled=True)
            if autocast
            else torch.enable_grad()
        ):
            loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(now, 0.1)
        if not torch.isfinite(loss):
            sys.exit("the loss is not finite")
        print(f"loss {loss.item():.3f}")

    return step


def pair():
    """Two networks with an optimizer each."""
    first = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32))
    second = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizers = [torch.optim.Adam(one.parameters()) for one in (first, second)]

    def step():
        made = first(torch.randn(16, 8))
        optimizers[1].zero_grad()
        functional.softplus(second(made.detach())).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        functional.softplus(-second(made)).mean().backward()
        optimizers[0].step()

    return step


def four_parts():
    """A model, an optimizer, a batch and a step that takes them."""
    model = nn.Linear(16, 16)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 16), step


def looked_up(
    kind="sparse_adam",
    rows=5000,
    is_sparse=True,
    padding=None,
    passes=1,
    in_bags=False,
    momentum=0.0,
):
    """A table of which each step looks up 512 rows, all of them different."""
    table = (nn.EmbeddingBag if in_bags else nn.Embedding)(
        rows, 64, sparse=is_sparse, padding_idx=padding
    )
    head = nn.Linear(64, 8)
    both = [*table.parameters(), *head.parameters()]
    if kind == "sparse_adam":
        optimizers = [
            torch.optim.SparseAdam(table.parameters()),
            torch.optim.Adam(head.parameters()),
        ]
    else:
        optimizers = [
            torch.optim.SGD(both, momentum=momentum) if kind == "sgd" else torch.optim.Adagrad(both)
        ]

    def step():
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number in range(passes):
            tokens = torch.arange(512).view(8, 64) + 1 + 512 * number
            head(table(tokens)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def masked():
    """A loss over the elements that a mask chooses, of different rows."""
    model = nn.Linear(16, 16).cuda()

    def step():
        rows, *places = torch.unique(
            torch.randn(8, 16, device="cuda"), return_inverse=True, return_counts=True, dim=0
        )
        assert [tuple(each.shape) for each in (rows, *places)] == [(8, 16), (8,), (8,)]
        out = model(rows)
        out[out > 0].sum().backward()

    return step


def sentences(is_packed=True, samples=8, times=64):
    """A recurrent network over sentences, packed or padded."""
    model = nn.LSTM(16, 32, batch_first=True).cuda()
    rnn = nn.utils.rnn

    def step():
        given = torch.randn(samples, times, 16, device="cuda")
        if is_packed:
            given = rnn.pack_padded_sequence(
                given, torch.randint(1, times, (samples,)), batch_first=True, enforce_sorted=False
            )
        found, _ = model(given)
        if is_packed:
            found, _ = rnn.pad_packed_sequence(found, batch_first=True)
        assert found.shape == (samples, times, 32)
        found.square().sum().backward()

    return step


def letters(labels=100, as_lists=False):
    """CTC's loss, with lengths in tensors of the CPU or in lists."""
    model = nn.Linear(16, 30).cuda()

    def step():
        scores = model(torch.randn(200, 8, 16, device="cuda")).log_softmax(2)
        targets = torch.randint(1, 30, (8, labels), device="cuda")
        lengths = [200] * 8, [labels] * 8
        times, long = lengths if as_lists else map(torch.tensor, lengths)
        nn.functional.ctc_loss(scores, targets, times, long).backward()
        torch.bincount(targets.flatten(), minlength=30)

    return step


def recomputed(is_recomputed=True):
    """A checkpoint whose function makes tensors on the card."""
    net = nn.Linear(64, 64).cuda()

    def block(x):
        noise = torch.randn(x.shape, device="cuda")
        return (net(x + noise.cuda()) + torch.zeros(64).cuda()).square()

    def step():
        x = torch.ones(32, 64, device="cuda")
        run = functools.partial(checkpoint, block, use_reentrant=False) if is_recomputed else block
        run(x).mean().backward()

    return step


def on_cards(is_parallel=True, has_views=False, is_synced=True):
    """One of several processes that torchrun starts."""
    if is_parallel:
        distributed.init_process_group("nccl")
    assert (distributed.is_initialized(), distributed.get_world_size()) == (
        is_parallel,
        2 if is_parallel else 1,
    )
    card = distributed.get_rank()
    torch.cuda.set_device(card)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3)
    ).to(f"cuda:{card}")
    if is_synced:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if is_parallel:
        model = DistributedDataParallel(model, device_ids=[card], gradient_as_bucket_view=has_views)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        loss = model(torch.randn(2, 3, 16, 16, device="cuda")).square().mean()
        loss.backward()
        distributed.all_reduce(loss)
        optimizer.step()

    return step


def ends():
    """A step that ends the program."""
    nn.Linear(2, 2).cuda()
    return lambda: sys.exit("no data")


def broken():
    """A step with a mistake in it."""
    model = nn.Linear(2, 2).cuda()
    return lambda: model(torch.randn(2, 3, device="cuda"))


def number():
    """No step at all."""
    return 3


def recorded(is_recorded=True):
    """A step that is warmed up and recorded as a CUDA graph."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    x = torch.randn(256, 512, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    if not is_recorded:
        return step
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay():
        graph.replay()
        return model

    return replay


def in_parts():
    """A network whose forward and backward are recorded apart."""
    model = nn.Linear(8, 8).cuda()
    torch.cuda.make_graphed_callables(model, (torch.randn(4, 8, device="cuda"),))


def shared_out(way="plain"):
    """Eight layers whose weights are shared out over cards by FSDP2, with AdamW."""
    from torch import distributed
    from torch.distributed import fsdp

    distributed.init_process_group("nccl")
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    options = {}
    if way == "half":
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model:
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(32, 1024, device="cuda")).float().sum().backward()
        optimizer.step()

    return step


def computed(batch_size=2):
    """A network whose widths are computed with tensors on the default device."""
    with torch.device("cuda"):
        widths = (torch.arange(1, 4) * 64.0).int().tolist()
        rates = [rate.item() for rate in torch.linspace(0, 1, len(widths) - 1)]
        layers = [
            nn.Sequential(nn.Linear(*sizes), nn.Dropout(rate) if rate else nn.Identity())
            for sizes, rate in zip(itertools.pairwise(widths), rates)
        ]
        model = nn.Sequential(*layers)
        next(iter(torch.utils.data.DataLoader([1, 2])))
        nn.init.trunc_normal_(model[0][0].bias)
        print(model[0][0].weight.isnan().any().item(), widths)
    return lambda: model(torch.randn(batch_size, widths[0], device="cuda")).sum().backward()


def by_chance():
    """A network whose width is a matter of chance."""
    return nn.Linear(8 // torch.randint(1, 3, ()).item(), 1)


def suppressed():
    """Boxes of which a non-maximum suppression keeps as many as it finds."""
    import torchvision  # noqa: F401

    net = nn.Linear(8, 5).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        found = net(batch)
        boxes, scores = found[:, :4].detach().cumsum(1), found[:, 4].detach()
        found[torch.ops.torchvision.nms(boxes, scores, 0.5)].square().mean().backward()
        optimizer.step()

    drawn = torch.Generator(device="cuda").manual_seed(0)
    return net, optimizer, torch.rand(100, 8, device="cuda", generator=drawn), step


def convolutions(products=None, parallel=False):
    """Wide convolutions and a product; `products` is written by the newer switch for all of them."""
    if products is not None:
        torch.backends.fp32_precision = products
        torch.backends.cudnn.conv.fp32_precision = products  # torch 2.11's do not follow
    net = nn.Sequential(
        nn.Conv2d(64, 256, 3),
        nn.ReLU(),
        nn.Conv2d(256, 64, 3),
        nn.Flatten(),
        nn.Linear(64 * 28**2, 10),
    ).cuda()
    net = nn.DataParallel(net) if parallel else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    image = torch.zeros(16, 64, 32, 32, device="cuda")

    def step(batch):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()

    return net, optimizer, image, step


def accelerated():
    """Accelerate's float16 and its accumulation, on the card that it finds."""
    from accelerate import Accelerator

    own = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
    net, optimizer = own.prepare(net, torch.optim.AdamW(net.parameters()))

    def step(batch):
        with own.accumulate(net):
            own.backward(net(batch).square().mean())
            if own.sync_gradients:
                own.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return net, optimizer, torch.zeros(64, 256, device=own.device), step
