"""What `own_step_card.py` plans and measures: unmodified models of timm, torchvision and transformers, random weights.

`build` is a factory as `mpt plan scripts/card/own_step_card_models.py:build case=NAME` takes it. Nothing here knows
mpt: the modes are written as a training script writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 1000
DEVICE = "cuda"


@dataclass(frozen=True)
class Case:
    """A model, its batch, and how the script trains it."""

    model: str
    """`timm:NAME`, `torchvision:NAME`, or a name of `LANGUAGE`."""
    mode: str
    """fp32, amp, bf16, bf16-pure, amp-nhwc or bf16-recompute; see `step_of`."""
    batch: int
    size: int = 224
    """Pixels of a side, or tokens."""
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        """The model, the mode, the optimizer and the batch in one word."""
        return f"{self.model}-{self.mode}-{self.optimizer}-{self.batch}x{self.size}"


def cases_of(mode: str, optimizer: str, batch: int, *models: str, size: int = 224) -> list[Case]:
    """Return several models that are trained alike."""
    return [Case(model, mode, batch, size, optimizer) for model in models]


CASES = [
    # the networks that everybody trains, each in the modes of a script
    Case("timm:resnet50", "fp32", 64, optimizer="sgd"),
    Case("timm:vit_base_patch16_224", "amp", 64),
    Case("timm:convnext_tiny", "amp", 64),
    Case("timm:efficientnet_b0", "amp-nhwc", 128, optimizer="rmsprop"),
    Case("gpt2", "bf16", 8, 1024),
    Case("torchvision:deeplabv3_resnet50", "amp", 8, 512, "sgd"),
    Case("timm:swin_tiny_patch4_window7_224", "bf16", 64),
    Case("bert_large", "amp", 16, 384),
    Case("llama_1b", "bf16-recompute", 2, 2048),
    Case("timm:resnet50", "amp-nhwc", 128, optimizer="sgd"),
    Case("torchvision:mnasnet1_0", "fp32", 200, 86, "adam"),
    Case("torchvision:mnasnet1_0", "fp32", 300, 86, "sgd"),
    Case("torchvision:vgg19", "fp32", 200, 86, "adam"),
    Case("torchvision:fcn_resnet50", "fp32", 4, 512, "sgd"),
    Case("t5_base", "bf16", 8, 512),
    Case("whisper_small", "amp", 4, 3000),
    Case("timm:vit_large_patch16_224", "bf16-recompute", 64),
    Case("timm:vit_large_patch16_224", "bf16-pure", 32),
    # one of each family
    *cases_of(
        "amp",
        "adamw",
        64,
        *[
            "torchvision:regnet_y_1_6gf",
            "timm:mobilenetv3_large_100",
            "timm:densenet121",
            "timm:mixer_b16_224",
        ],
        *["timm:coatnet_0_rw_224", "timm:maxvit_tiny_rw_224", "timm:edgenext_small"],
        *["timm:ghostnet_100", "timm:beit_base_patch16_224", "timm:cait_xxs24_224"],
        *["timm:pvt_v2_b1", "timm:poolformer_s12", "timm:eca_nfnet_l0", "timm:tf_efficientnetv2_s"],
    ),
    *cases_of(
        "fp32",
        "sgd",
        32,
        *["timm:resnext50_32x4d", "timm:res2net50_26w_4s", "timm:dla60", "timm:hrnet_w18"],
        *["timm:dpn68", "timm:seresnet50", "timm:cspdarknet53", "timm:xception41"],
        *["torchvision:vgg16", "torchvision:squeezenet1_1", "torchvision:shufflenet_v2_x1_0"],
        *["torchvision:googlenet", "torchvision:inception_v3"],
    ),
    *cases_of(
        "bf16",
        "adamw",
        64,
        *[
            "timm:levit_128",
            "timm:xcit_tiny_12_p16_224",
            "timm:twins_svt_small",
            "timm:focalnet_tiny_srf",
        ],
        *["timm:davit_tiny", "timm:repvgg_a2", "timm:hiera_tiny_224", "timm:mvitv2_tiny"],
        *["timm:nest_tiny", "timm:crossvit_9_240", "timm:volo_d1_224", "timm:visformer_small"],
    ),
    Case("qwen2_500m", "bf16-recompute", 4, 1024),
    Case("qwen2_500m", "bf16", 2, 1024),
    Case("gpt2", "fp32", 4, 1024),
    Case("segformer_b1", "amp", 8, 512),
    Case("clip_base", "amp", 64, 224),
    Case("torchvision:lraspp_mobilenet_v3_large", "amp", 16, 512, "sgd"),
    Case("timm:convnext_base", "bf16-pure", 32),
    Case("timm:resnet152", "bf16-recompute", 128, optimizer="sgd"),
    Case("torchvision:resnet18", "fp32", 300, 86, "adam"),
    Case("torchvision:mobilenet_v3_large", "fp32", 300, 86, "rmsprop"),
    Case("torchvision:mnasnet1_0", "fp32", 500, 86, "adam"),
]


def build(case: str) -> Callable[[], Any]:
    """Return the step of a case by its name."""
    chosen = {one.name: one for one in CASES}[case]
    with torch.device(DEVICE):
        if chosen.model.startswith(("timm:", "torchvision:")):
            model, loss = pictures(chosen)
        else:
            model, loss = LANGUAGE[chosen.model](chosen)
    if chosen.mode == "bf16-pure":
        model.to(torch.bfloat16)
    if chosen.mode.endswith("-nhwc"):
        model.to(memory_format=torch.channels_last)
    if chosen.mode.endswith("-recompute"):
        recompute(model)
    return step_of(chosen, model.train(), loss)


def step_of(case: Case, model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], Any]:
    """Return the step as a script writes it: autocast, GradScaler, clipping, the optimizer."""
    optimizer = optimizer_of(case.optimizer, model)
    dtype = {"amp": torch.float16, "bf16": torch.bfloat16}.get(case.mode.partition("-")[0])
    uses_autocast = dtype is not None and case.mode != "bf16-pure"
    scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0, enabled=dtype == torch.float16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, dtype, enabled=uses_autocast):
            value = loss()
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's optimizer with its defaults."""
    parameters = list(model.parameters())
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    made = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}
    return made[name](parameters, lr=1e-5)


def recompute(model: nn.Module) -> None:
    """Switch on the recomputation that the library has itself."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(True)
    else:
        raise ValueError(f"{type(model).__name__} has no recomputation")


def pictures(case: Case) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a classifier or a segmentation network of timm or torchvision with its loss."""
    library, _, name = case.model.partition(":")
    dense = name.startswith(("deeplab", "fcn", "lraspp"))
    if library == "timm":
        import timm

        model = timm.create_model(name, num_classes=CLASSES)
    else:
        from torchvision import models

        kind = models.segmentation if dense else models
        options: dict[str, Any] = {"weights_backbone": None} if dense else {}
        options |= {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        model = getattr(kind, name)(weights=None, num_classes=21 if dense else CLASSES, **options)
    size = 240 if name == "crossvit_9_240" else 299 if name == "inception_v3" else case.size
    shape = (case.batch, 3, size, size)
    dtype = torch.bfloat16 if case.mode == "bf16-pure" else torch.float32
    layout = torch.channels_last if case.mode.endswith("-nhwc") else torch.contiguous_format
    images = torch.randn(shape, dtype=dtype).contiguous(memory_format=layout)
    labels = torch.randint(0, 21 if dense else CLASSES, (shape[0], *(shape[2:] if dense else ())))

    def loss() -> Tensor:
        found = model(images)
        if dense:
            return functional.cross_entropy(found["out"], labels)
        if hasattr(found, "logits"):  # GoogLeNet and Inception have heads beside
            beside = [one for one in found[1:] if one is not None]
            whole = functional.cross_entropy(found.logits, labels)
            return sum((0.3 * functional.cross_entropy(one, labels) for one in beside), whole)
        if isinstance(found, tuple):
            found = found[0]
        return functional.cross_entropy(found, labels)

    return model, loss


def causal(config: Callable[[], Any]) -> Callable[[Case], tuple[nn.Module, Callable[[], Tensor]]]:
    """Return the builder of a language model of transformers."""

    def made(case: Case) -> tuple[nn.Module, Callable[[], Tensor]]:
        from transformers import AutoModelForCausalLM

        settings = config()
        settings.use_cache = False
        model = AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa")
        ids = torch.randint(0, settings.vocab_size, (case.batch, case.size))
        return model, lambda: model(input_ids=ids, labels=ids).loss

    return made


def gpt2_config() -> Any:
    """GPT-2 of 124 M weights, without dropout, whose masks torch's attention keeps out of sight."""
    from transformers import GPT2Config

    return GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def llama_config() -> Any:
    """TinyLlama's sizes: 1.1 B weights."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
    return LlamaConfig(num_attention_heads=32, num_key_value_heads=4, **sizes)


def qwen_config() -> Any:
    """Qwen2's smallest: 0.5 B weights, a vocabulary of 151,936."""
    from transformers import Qwen2Config

    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2}
    return Qwen2Config(vocab_size=151936, tie_word_embeddings=True, **sizes, **heads)


def bert_large(case: Case) -> tuple[nn.Module, Callable[[], Tensor]]:
    """BERT-large with the loss of a masked word."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    model = BertForMaskedLM(BertConfig(intermediate_size=4096, **sizes))
    ids = torch.randint(0, 30522, (case.batch, case.size))
    return model, lambda: model(input_ids=ids, labels=ids).loss


def t5_base(case: Case) -> tuple[nn.Module, Callable[[], Tensor]]:
    """T5-base, as many tokens in as out."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes))
    ids = torch.randint(0, 32000, (case.batch, case.size))
    return model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss


def whisper_small(case: Case) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Whisper-small on thirty seconds of sound."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12}
    heads = {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
    wide = {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads, **wide))
    sound = torch.randn(case.batch, 80, case.size)
    ids = torch.randint(0, 50000, (case.batch, 128))
    return model, lambda: model(input_features=sound, labels=ids, use_cache=False).loss


def segformer_b1(case: Case) -> tuple[nn.Module, Callable[[], Tensor]]:
    """SegFormer-B1 on 150 classes."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    sizes = {"hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 256}
    model = SegformerForSemanticSegmentation(SegformerConfig(num_labels=150, **sizes))
    images = torch.randn(case.batch, 3, case.size, case.size)
    labels = torch.randint(0, 150, (case.batch, case.size, case.size))
    return model, lambda: model(pixel_values=images, labels=labels).loss


def clip_base(case: Case) -> tuple[nn.Module, Callable[[], Tensor]]:
    """CLIP-B/32 with its contrastive loss."""
    from transformers import CLIPConfig, CLIPModel

    model = CLIPModel(CLIPConfig())
    images = torch.randn(case.batch, 3, case.size, case.size)
    ids = torch.randint(1, 49405, (case.batch, 77))
    return model, lambda: model(input_ids=ids, pixel_values=images, return_loss=True).loss


LANGUAGE: dict[str, Callable[[Case], tuple[nn.Module, Callable[[], Tensor]]]] = {
    "gpt2": causal(gpt2_config),
    "llama_1b": causal(llama_config),
    "qwen2_500m": causal(qwen_config),
    "bert_large": bert_large,
    "t5_base": t5_base,
    "whisper_small": whisper_small,
    "segformer_b1": segformer_b1,
    "clip_base": clip_base,
}
