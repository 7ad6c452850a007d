"""Small networks of the kinds that training scripts have: each is a stem, a body and a head in a row.

They take images, rows, tokens or series of a batch and return `CLASSES` numbers for each.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

WIDTH, CLASSES, WORDS, LENGTH = 16, 10, 100, 12


def images(batch, **place):
    return torch.rand(batch, 3, 8, 8, **place)


def rows(batch, **place):
    return torch.rand(batch, WIDTH, **place)


def tokens(batch, **place):
    return torch.randint(CLASSES, (batch, LENGTH), **place)


def series(batch, **place):
    return torch.rand(batch, LENGTH, WIDTH, **place)


class Calls(nn.Module):
    """A function of a value and of modules."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def pooled():
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES))


def averaged():
    return Calls(lambda own, x: own.out(x.mean(1)), out=nn.Linear(WIDTH, CLASSES))


def mlp():
    body = nn.Sequential(nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.GELU())
    return nn.Sequential(nn.Linear(WIDTH, 32), body, nn.Linear(32, CLASSES)), rows


def convolutions():
    stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU())
    body = nn.Sequential(
        nn.Conv2d(WIDTH, WIDTH, 3, bias=False), nn.BatchNorm2d(WIDTH), nn.SiLU(), nn.MaxPool2d(2)
    )
    return nn.Sequential(stem, body, pooled()), images


def channels_last():
    model, _ = convolutions()
    model = model.to(memory_format=torch.channels_last)
    return model, lambda batch, **place: images(batch, **place).to(
        memory_format=torch.channels_last
    )


def depthwise():
    gate = nn.Sequential(nn.Conv2d(WIDTH, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, WIDTH, 1))
    gate.append(nn.Hardsigmoid())
    body = nn.Sequential(
        nn.Conv2d(WIDTH, WIDTH, 3, groups=WIDTH, padding=1),
        nn.BatchNorm2d(WIDTH),
        nn.Hardswish(inplace=True),
        Calls(lambda own, x: x * own.gate(x.mean((2, 3), True)), gate=gate),
        nn.Conv2d(WIDTH, WIDTH, 1),
        nn.PReLU(),
    )
    return nn.Sequential(nn.Conv2d(3, WIDTH, 3, stride=2), body, pooled()), images


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), layer, averaged()), tokens


class Block(nn.Module):
    """Causal attention with rotated places, and a gated part."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(32, WIDTH, bias=False)
        self.register_buffer("turn", torch.arange(LENGTH)[:, None] * torch.ones(8), False)

    def forward(self, x):
        query, key, value = (
            self.qkv(self.norm(x)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        )
        query, key = (one * self.turn.cos().to(one.dtype) for one in (query, key))
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        gate, wide = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * wide)


def decoder():
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.Sequential(Block(), Block()), averaged()
    ), tokens


def recurrent(kind):
    def build():
        body = Calls(lambda own, x: own.net(x)[0], net=kind(WIDTH, WIDTH, batch_first=True))
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), body, averaged()), series

    return build


def cells():
    def unroll(own, x):
        state = x.new_zeros(len(x), WIDTH)
        found = []
        for each in x.unbind(1):
            state = own.cell(each, state)
            found.append(state)
        return torch.stack(found, 1)

    body = Calls(unroll, cell=nn.GRUCell(WIDTH, WIDTH))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), body, averaged()), series


def long_cells():
    def unroll(own, x):
        state = None
        found = []
        for each in x.unbind(1):
            state = own.cell(each, state)
            found.append(state[0])
        return torch.stack(found, 1)

    body = Calls(unroll, cell=nn.LSTMCell(WIDTH, WIDTH))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), body, averaged()), series


def looked_up():
    words = nn.Embedding(WORDS, WIDTH, sparse=True)
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(words, body, averaged()), lambda batch, **place: torch.arange(
        batch * LENGTH, **place
    ).view(batch, LENGTH)


def tied():
    words, head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
    head.weight = words.weight
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Mish())
    return nn.Sequential(words, body, Calls(lambda own, x: own.out(x.mean(1)), out=head)), tokens


def normed(how):
    def build():
        stem = how(nn.Conv2d(3, WIDTH, 3))
        body = nn.Sequential(nn.LeakyReLU(0.2), how(nn.Conv2d(WIDTH, WIDTH, 3)), nn.ELU())
        return nn.Sequential(stem, body, pooled()), images

    return build


class Skips(nn.Module):
    """Down, up, and the skip between."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.GroupNorm(4, WIDTH), nn.SiLU(), nn.Conv2d(WIDTH, 32, 3, 2, 1))
        self.up = nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, WIDTH, 3, 1, 1))
        self.both = nn.Conv2d(2 * WIDTH, WIDTH, 1)

    def forward(self, x):
        low = functional.interpolate(self.up(self.down(x)), scale_factor=2, mode="nearest")
        return self.both(torch.cat([x, low], 1))


def unet():
    return nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), Skips(), pooled()), images


def two_heads():
    head = Calls(
        lambda own, x: own.first(x) * own.second(x.detach()).sigmoid(),
        first=nn.Linear(32, CLASSES),
        second=nn.Linear(32, CLASSES),
    )
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Softplus(), head), rows


def frozen():
    model, made = convolutions()
    model[:2].requires_grad_(False)
    model[1] = Calls(lambda own, x: own.net.eval()(x), net=model[1])
    model[2].insert(2, nn.BatchNorm1d(WIDTH))
    return model, made


def fourier():
    def filtered(own, x):
        waves = torch.fft.rfft2(x.float())
        found = torch.fft.irfft2(waves * torch.view_as_complex(own.weight.float()), x.shape[-2:])
        return x + found.to(x.dtype)

    weight = nn.Parameter(torch.randn(WIDTH, 8, 5, 2))
    return nn.Sequential(nn.Conv2d(3, WIDTH, 1), Calls(filtered, weight=weight), pooled()), images


class Cubed(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * ctx.scale * x * x * gradient, None


def through(function):
    def build():
        body = Calls(lambda own, x: own.out(function(x)), out=nn.Linear(32, 32))
        return nn.Sequential(nn.Linear(WIDTH, 32), body, nn.Linear(32, CLASSES)), rows

    return build


class Softened(torch.autograd.Function):
    """One in the newer form, which `torch.func` takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x / (1 + x.abs())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient / (1 + x.abs()).square()


def translator():
    def translate(own, x):
        padded = torch.arange(LENGTH, device=x.device) >= 9
        padded = padded.expand(len(x), -1)
        causal = nn.Transformer.generate_square_subsequent_mask(
            LENGTH, device=x.device, dtype=x.dtype
        )
        mask = torch.zeros(padded.shape, dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(padded, float("-inf"))
        return own.net(
            x, x, tgt_mask=causal, src_key_padding_mask=mask, memory_key_padding_mask=mask
        )

    net = nn.Transformer(WIDTH, 2, 1, 1, 32, batch_first=True)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), Calls(translate, net=net), averaged()), tokens


def attended():
    def attend(own, x):
        found, weights = own.net(x, x, x, need_weights=True)
        return found * (1 + weights.mean(-1, keepdim=True))

    net = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls(attend, net=net), averaged()), series


def transposed():
    body = nn.Sequential(
        nn.ConvTranspose2d(WIDTH, WIDTH, 2, 2),
        nn.InstanceNorm2d(WIDTH, affine=True),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    head = Calls(lambda own, x: own.both(x, x.roll(1, 0)), both=nn.Bilinear(WIDTH, WIDTH, CLASSES))
    return nn.Sequential(nn.Conv2d(3, WIDTH, 3, stride=2), body, head), images


def adapters():
    def adapted(own, x):
        return own.base(x) + own.up(own.down(x)) * 2

    def adapt(base):
        down, up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
        return Calls(adapted, base=base.requires_grad_(False), down=down, up=up)

    body = nn.Sequential(adapt(nn.Linear(32, 32)), nn.ReLU(), adapt(nn.Linear(32, 32)))
    stem = nn.Linear(WIDTH, 32).requires_grad_(False)
    return nn.Sequential(stem, body, nn.Linear(32, CLASSES)), rows


class Table(nn.Module):
    """Adds rows of a table in half, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(LENGTH, WIDTH, dtype=torch.bfloat16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("spread", torch.ones(WIDTH))

    def forward(self, x):
        self.calls += 1
        self.spread.mul_(0.9).add_(0.1 * x.detach().float().std((0, 1)))
        return x + self.table.to(x.dtype) / self.spread.to(x.dtype)


def tables():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Table(), averaged()), series


def experts():
    def mix(own, x):
        weights, chosen = own.gate(x).softmax(-1).topk(2, -1)
        found = torch.stack([one(x) for one in own.each], 1)
        taken = found.gather(1, chosen[..., None].expand(-1, -1, 32))
        return (weights[..., None] * taken).sum(1)

    each = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU6()) for _ in range(4))
    body = Calls(mix, gate=nn.Linear(32, 4), each=each)
    return nn.Sequential(nn.Linear(WIDTH, 32), body, nn.Linear(32, CLASSES)), rows


def passed_on():
    """Messages along the edges of a ring."""

    def send(own, x):
        source = torch.arange(LENGTH, device=x.device).repeat_interleave(2)
        target = (source + 1) % LENGTH
        sent = own.message(x[:, source])
        summed = torch.zeros_like(x, dtype=sent.dtype).index_add(1, target, sent)
        return own.norm(x + summed)

    body = Calls(send, message=nn.Linear(WIDTH, WIDTH), norm=nn.LayerNorm(WIDTH))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), body, averaged()), series


def waves():
    body = nn.Sequential(
        nn.Conv1d(LENGTH, 2 * LENGTH, 3, padding=2, dilation=2),
        nn.GLU(1),
        nn.AvgPool1d(3, 1, 1),
        nn.ReflectionPad1d(2),
        nn.Conv1d(LENGTH, LENGTH, 5),
        nn.Dropout1d(0.2),
    )
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), body, averaged()), series


NETWORKS = {
    "mlp": mlp,
    "convolutions": convolutions,
    "channels_last": channels_last,
    "depthwise": depthwise,
    "encoder": encoder,
    "decoder": decoder,
    "lstm": recurrent(nn.LSTM),
    "gru": recurrent(nn.GRU),
    "cells": cells,
    "long_cells": long_cells,
    "looked_up": looked_up,
    "tied": tied,
    "weight_norm": normed(parametrizations.weight_norm),
    "spectral_norm": normed(parametrizations.spectral_norm),
    "old_weight_norm": normed(nn.utils.weight_norm),
    "unet": unet,
    "two_heads": two_heads,
    "frozen": frozen,
    "fourier": fourier,
    "own_function": through(lambda x: Cubed.apply(x, 0.1)),
    "newer_function": through(Softened.apply),
    "translator": translator,
    "attended": attended,
    "transposed": transposed,
    "adapters": adapters,
    "tables": tables,
    "experts": experts,
    "passed_on": passed_on,
    "waves": waves,
}
