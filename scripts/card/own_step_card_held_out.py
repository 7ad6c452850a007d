"""More steps for `own_step_card.py --cases held_out`: kinds of networks that no other table of ours has.

Chosen after the planner's last change that a card had asked for: video, sound, detection, masked pictures, graphs,
diffusion, and families of timm that the first table lacks. Unmodified networks with random weights, as a script trains
them; nothing here knows mpt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

DEVICE = "cuda"
Made = tuple[nn.Module, Callable[[], Tensor]]
"""A network, and what computes the loss of a step."""


@dataclass(frozen=True)
class Case:
    """A network and how it is trained: `fp32`, `amp` (float16 with a scaler), `bf16`, or `bf16-pure` (weights too)."""

    network: str
    make: Callable[[], Made]
    mode: str
    optimizer: str = "adamw"
    batch: int = 1

    @property
    def name(self) -> str:
        """The network, the mode and the optimizer in one word."""
        return f"{self.network}-{self.mode}-{self.optimizer}"


def labelled(config: str, model: str, batch: int, tokens: int, **sizes: Any) -> Callable[[], Made]:
    """Return the builder of a language model of transformers that computes its own loss."""

    def make() -> Made:
        import transformers

        settings = getattr(transformers, config)(**sizes)
        settings.use_cache = False
        network = getattr(transformers, model)(settings)
        ids = torch.randint(5, settings.vocab_size - 5, (batch, tokens))
        return network, lambda: network(input_ids=ids, labels=ids).loss

    return make


def perceived(
    config: str, model: str, shape: tuple[int, ...], labels: str = "", **sizes: Any
) -> Callable[[], Made]:
    """Return the builder of a network of transformers for pictures, video or sound that computes its own loss."""

    def make() -> Made:
        import transformers

        network = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        given: dict[str, Any] = {
            "pixel_values" if len(shape) > 2 else "input_values": torch.randn(shape)
        }
        if labels == "classes":
            given["labels"] = torch.randint(0, 2, shape[:1])
        elif labels == "letters":
            given["labels"] = torch.randint(1, 30, (shape[0], 40))
        elif labels == "places":  # nine tenths of a video's tubes are hidden
            count = shape[1] // 2 * 14 * 14
            given["bool_masked_pos"] = (torch.arange(count) < count * 9 // 10).expand(shape[0], -1)
        return network, lambda: network(**given).loss

    return make


def classified(name: str, batch: int, size: int = 224) -> Callable[[], Made]:
    """Return the builder of a classifier of timm."""

    def make() -> Made:
        import timm

        network = timm.create_model(name, num_classes=1000)
        images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
        return network, lambda: functional.cross_entropy(
            network(images), labels, label_smoothing=0.1
        )

    return make


def filmed(name: str, batch: int, frames: int, size: int) -> Callable[[], Made]:
    """Return the builder of a classifier of videos of torchvision."""

    def make() -> Made:
        from torchvision.models import video

        network = getattr(video, name)(weights=None)
        films = torch.randn(batch, 3, frames, size, size)
        labels = torch.randint(0, 400, (batch,))
        return network, lambda: functional.cross_entropy(network(films), labels)

    return make


def detected(name: str, batch: int, size: int) -> Callable[[], Made]:
    """Return the builder of a detector of torchvision, six boxes to a picture."""

    def make() -> Made:
        from torchvision.models import detection

        options: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": 21}
        network = getattr(detection, name)(**options)
        torch.manual_seed(0)
        images = [torch.rand(3, size, size) for _ in range(batch)]
        targets = []
        for _ in images:
            corners = torch.rand(6, 2) * size * 0.5
            boxes = torch.cat([corners, corners + 40 + torch.rand(6, 2) * size * 0.3], 1)
            targets.append({"boxes": boxes, "labels": torch.randint(1, 21, (6,))})
            if "mask" in name:
                targets[-1]["masks"] = (torch.rand(6, size, size) > 0.5).to(torch.uint8)
        return network, lambda: sum(network(images, targets).values())

    return make


def detr() -> Made:
    """DETR with a ResNet-50 of transformers and five boxes to a picture."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    options: dict[str, Any] = {"use_timm_backbone": False, "use_pretrained_backbone": False}
    backbone = ResNetConfig(out_features=["stage4"])
    network = DetrForObjectDetection(
        DetrConfig(backbone=None, backbone_config=backbone, num_labels=91, **options)
    )
    images = torch.randn(4, 3, 512, 512)
    labels = [
        {"class_labels": torch.randint(0, 90, (5,)), "boxes": torch.rand(5, 4) * 0.4 + 0.2}
        for _ in range(4)
    ]
    return network, lambda: network(pixel_values=images, labels=labels).loss


def segmented(kind: str, encoder: str, batch: int, size: int) -> Callable[[], Made]:
    """Return the builder of a network of segmentation-models-pytorch, whose step computes it twice."""

    def make() -> Made:
        import segmentation_models_pytorch as library

        network = getattr(library, kind)(encoder, encoder_weights=None, classes=1)
        images = torch.randn(batch, 3, size, size)
        masks = torch.rand(batch, 1, size, size).round()
        dice = library.losses.DiceLoss("binary")
        entropy = functional.binary_cross_entropy_with_logits
        return network, lambda: dice(network(images), masks) + entropy(network(images), masks)

    return make


def stable_diffusion() -> Made:
    """The UNet of Stable Diffusion 1.5 on latents of 64 x 64."""
    from diffusers import DDPMScheduler, UNet2DConditionModel

    network = UNet2DConditionModel(cross_attention_dim=768)
    schedule = DDPMScheduler()
    latents, text = torch.randn(2, 4, 64, 64), torch.randn(2, 77, 768)

    def loss() -> Tensor:
        noise = torch.randn_like(latents)
        times = torch.randint(0, 1000, (2,), device=latents.device)
        found = network(schedule.add_noise(latents, noise, times), times, text).sample
        return functional.mse_loss(found.float(), noise)

    return network, loss


def diffusion_transformer() -> Made:
    """A DiT-S of diffusers on latents of 32 x 32."""
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 6, "attention_head_dim": 64, "num_layers": 12}
    network = DiTTransformer2DModel(in_channels=4, out_channels=8, sample_size=32, **sizes)
    latents, classes = torch.randn(32, 4, 32, 32), torch.randint(0, 1000, (32,))

    def loss() -> Tensor:
        times = torch.randint(0, 1000, (32,), device=latents.device)
        return functional.mse_loss(network(latents, times, classes).sample[:, :4], latents)

    return network, loss


def graph(name: str, nodes: int, edges: int) -> Callable[[], Made]:
    """Return the builder of a network of torch_geometric on a graph of random edges."""

    def make() -> Made:
        import torch_geometric.nn as library

        network = getattr(library, name)(128, 256, 3, 40, dropout=0.5)
        features, ends = torch.randn(nodes, 128), torch.randint(0, nodes, (2, edges))
        labels = torch.randint(0, 40, (nodes,))
        return network, lambda: functional.cross_entropy(network(features, ends), labels)

    return make


def recurrent() -> Made:
    """A language model of two LSTM layers."""
    network = nn.ModuleDict(
        {
            "embedding": nn.Embedding(30000, 512),
            "layers": nn.LSTM(512, 1024, 2, batch_first=True, dropout=0.2),
            "head": nn.Linear(1024, 30000),
        }
    )
    ids = torch.randint(0, 30000, (32, 128))

    def loss() -> Tensor:
        found = network["head"](network["layers"](network["embedding"](ids))[0])
        return functional.cross_entropy(found.flatten(0, 1), ids.flatten())

    return network, loss


WIDTH_768 = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
WIDTH_1024 = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16}
HALVES = {"amp": ("fastvit_t8", "tiny_vit_11m_224", "inception_next_tiny", "repghostnet_100")}
HALVES["amp"] += ("convit_small", "mobilenetv4_conv_medium", "hgnetv2_b3", "swiftformer_s")
HALVES["bf16"] = ("convmixer_768_32", "mobilevit_s", "gcvit_xxtiny", "convformer_s18")
HALVES["bf16"] += ("sequencer2d_s", "pit_s_224", "starnet_s3", "efficientvit_b1")
WHOLE = ("nfnet_f0", "resnetv2_50", "tresnet_m", "ese_vovnet39b", "selecsls42b", "skresnet50")
WHOLE += ("rexnet_100", "mobileone_s1", "regnetz_b16", "lambda_resnet26t")
TRANSFORMERS = {"eva02_small_patch14_224": (64, 224), "deit3_small_patch16_224": (64, 224)}
TRANSFORMERS |= {"vit_small_patch14_dinov2": (8, 518), "swinv2_tiny_window8_256": (64, 256)}

CASES = [
    *(
        Case(f"timm:{name}-64", classified(name, 64), mode)
        for mode in HALVES
        for name in HALVES[mode]
    ),
    *(Case(f"timm:{name}-32", classified(name, 32), "fp32", "sgd") for name in WHOLE),
    *(
        Case(f"timm:{name}-{TRANSFORMERS[name][0]}", classified(name, *TRANSFORMERS[name]), "amp")
        for name in TRANSFORMERS
    ),
    Case("roberta", labelled("RobertaConfig", "RobertaForMaskedLM", 32, 256), "bf16"),
    Case("electra", labelled("ElectraConfig", "ElectraForMaskedLM", 64, 256), "amp"),
    Case(
        "opt",
        labelled(
            "OPTConfig",
            "OPTForCausalLM",
            8,
            512,
            ffn_dim=3072,
            word_embed_proj_dim=768,
            **WIDTH_768,
        ),
        "bf16",
    ),
    Case(
        "mistral",
        labelled(
            "MistralConfig",
            "MistralForCausalLM",
            4,
            1024,
            intermediate_size=3584,
            num_key_value_heads=4,
            **WIDTH_1024,
        ),
        "bf16-pure",
    ),
    Case("mobilebert", labelled("MobileBertConfig", "MobileBertForMaskedLM", 32, 128), "amp"),
    Case("convbert", labelled("ConvBertConfig", "ConvBertForMaskedLM", 16, 256), "bf16"),
    Case(
        "gptneox",
        labelled(
            "GPTNeoXConfig", "GPTNeoXForCausalLM", 4, 1024, intermediate_size=4096, **WIDTH_1024
        ),
        "amp",
    ),
    Case("bart", labelled("BartConfig", "BartForConditionalGeneration", 8, 256), "bf16"),
    Case(
        "deberta",
        labelled(
            "DebertaV2Config",
            "DebertaV2ForMaskedLM",
            8,
            256,
            intermediate_size=3072,
            **WIDTH_768,
        ),
        "bf16",
    ),
    Case("vitmae", perceived("ViTMAEConfig", "ViTMAEForPreTraining", (64, 3, 224, 224)), "amp"),
    Case(
        "videomae",
        perceived("VideoMAEConfig", "VideoMAEForPreTraining", (8, 16, 3, 224, 224), "places"),
        "bf16",
    ),
    Case(
        "timesformer",
        perceived(
            "TimesformerConfig", "TimesformerForVideoClassification", (4, 8, 3, 224, 224), "classes"
        ),
        "amp",
    ),
    Case(
        "dinov2",
        perceived("Dinov2Config", "Dinov2ForImageClassification", (64, 3, 224, 224), "classes"),
        "bf16",
    ),
    Case(
        "wav2vec2",
        perceived("Wav2Vec2Config", "Wav2Vec2ForCTC", (8, 64000), "letters", mask_time_prob=0.0),
        "amp",
    ),
    Case(
        "hubert",
        perceived("HubertConfig", "HubertForCTC", (8, 64000), "letters", mask_time_prob=0.0),
        "fp32",
    ),
    Case("detr", detr, "amp"),
    Case("r3d", filmed("r3d_18", 8, 16, 112), "amp", "sgd"),
    Case("swin3d", filmed("swin3d_t", 2, 16, 224), "bf16"),
    Case("mvit", filmed("mvit_v2_s", 2, 16, 224), "bf16"),
    Case("maskrcnn", detected("maskrcnn_resnet50_fpn", 2, 512), "fp32", "sgd"),
    Case("retinanet", detected("retinanet_resnet50_fpn", 2, 512), "amp", "sgd"),
    Case("ssd", detected("ssd300_vgg16", 16, 300), "fp32", "sgd"),
    Case("fcos", detected("fcos_resnet50_fpn", 2, 512), "fp32", "sgd"),
    Case("smp-unet", segmented("Unet", "resnet34", 8, 256), "amp"),
    Case("smp-deeplab", segmented("DeepLabV3Plus", "resnet50", 4, 384), "fp32"),
    Case("smp-fpn", segmented("FPN", "mit_b0", 8, 256), "amp"),
    Case("sd15", stable_diffusion, "amp"),
    Case("dit", diffusion_transformer, "bf16"),
    Case("gcn", graph("GCN", 20000, 400000), "fp32"),
    Case("gat", graph("GAT", 20000, 200000), "fp32"),
    Case("lstm", recurrent, "amp"),
]


def build(case: str) -> Callable[[], Any]:
    """Return the step of a case by its name: autocast, GradScaler, clipping, the optimizer."""
    chosen = {one.name: one for one in CASES}[case]
    with torch.device(DEVICE):
        network, loss = chosen.make()
    if chosen.mode == "bf16-pure":
        network.to(torch.bfloat16)
    weights = list(network.train().parameters())
    optimizer = (
        torch.optim.SGD(weights, 1e-3, momentum=0.9)
        if chosen.optimizer == "sgd"
        else torch.optim.AdamW(weights, 1e-5)
    )
    dtype = {"amp": torch.float16, "bf16": torch.bfloat16}.get(chosen.mode)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0, enabled=dtype == torch.float16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, dtype or torch.float16, enabled=dtype is not None):
            value = loss()
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step
