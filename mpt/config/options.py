"""The declarations of a plugin file's settings, without torch.

A model, data set, precision mode, memory trick, optimizer or task is one file; its name in YAML is the file's name. The
file declares `class Settings(Options)`. So that `mpt validate` answers at once, the registry reads that class from the
source without running the rest of the file: a `Settings` class may therefore use only imports from `typing`,
`pydantic` and `mpt.config`.

Further optional top-level literals are read the same way: `NAMES`, a dict of further YAML names each with the defaults
it changes (`NAMES = {"O2": {}, "O3": {"loss_scale": 1.0}}`: the file's own name is then not a YAML name unless listed),
and in model files `TASK = "gan"`, the task a model is trained by. `SHARDED = True` says of a precision mode, a memory
trick or an optimizer that it works if weights are sharded over processes (`parallel.strategy: fsdp`). In a task's
file `EMA = {"decay": 0.9999}` is the default of `train.ema`; `MOVED = {"ema": "train.ema.decay"}` says where
settings of an earlier version are now, so that configurations which have them keep working; `DATASET = "name"` is a
data set that the task can learn from, for `mpt init`, if that is not the default one. `PATHS = ("src", "dst")` names
further settings that are files or folders. `ABOUT = {"O2": "..."}` describes each of several `NAMES`.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

StableForm = Literal[
    "log", "cross_entropy", "softmax", "norm", "variance", "distance", "divide_first", "epsilon"
]
STABLE_FORMS: tuple[str, ...] = get_args(StableForm)
CROSS_ENTROPY = "cross_entropy"
"""The loss of a classifier that is no file's: torch's own."""
AUGMENTATIONS = (
    "AugMix",
    "AutoAugment",
    "CenterCrop",
    "ColorJitter",
    "ElasticTransform",
    "GaussianBlur",
    "GaussianNoise",
    "Grayscale",
    "Pad",
    "RandAugment",
    "RandomAdjustSharpness",
    "RandomAffine",
    "RandomAutocontrast",
    "RandomCrop",
    "RandomEqualize",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomInvert",
    "RandomPerspective",
    "RandomPosterize",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomSolarize",
    "RandomVerticalFlip",
    "RandomZoomOut",
    "TrivialAugmentWide",
)
"""The torchvision transforms that `dataset.augment` may name: those that take one image and return one."""


class Options(BaseModel):
    """Settings of one plugin. Unknown keys and wrong types are errors; instances are immutable.

    `shorthand` names the field that a bare scalar sets, so that `micro_batch: 4` (samples) may be written for
    `micro_batch: {size: 4}`; `true` means all defaults.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    shorthand: ClassVar[str | None] = None


def setting_of(settings: Options, name: str, default: Any = None) -> Any:
    """Return a setting that not every part of a kind has, such as a model's `image_size`; the default if it lacks
    it.
    """
    return settings.__dict__.get(name, default) if name in type(settings).model_fields else default


def bare_setting(settings: Options) -> Any:
    """Return the setting that a bare scalar gives (`shorthand`); None if there is none."""
    return None if settings.shorthand is None else setting_of(settings, settings.shorthand)


def options_within(annotation: Any) -> type[Options] | None:
    """Return the class of the mapping that a field may hold, or holds several of."""
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return annotation
    return next((found for part in get_args(annotation) if (found := options_within(part))), None)


class ModelOptions(Options):
    """Settings that every model has, in addition to its own."""

    weights: str | None = None
    """Local file of weights to start from (.safetensors, or a file of torch.save), or the folder of a run or of a
    checkpoint; relative to the working directory, else to this file's folder. Tensors that do not fit, such as a head
    for other classes, keep their initial values, and are listed."""


class GenerativeOptions(Options):
    """Settings of every task that makes images."""

    preview_count: int = Field(64, ge=1)
    """Samples in each preview."""
    truncation: float = Field(0.7, ge=0, le=1)
    """How far the truncated samples of `mpt infer` go from the mean latent (StyleGAN2: from the mean style)."""
    metric_samples: int = Field(2000, ge=2)
    """Samples that are judged in addition to the test images."""
    inception_weights: str | None = None
    """Local file of Inception weights; with it the published FID is measured too."""


class DatasetOptions(Options):
    """Settings that every data set has. `image_size` and `channels` default to the model's."""

    image_size: int | None = Field(None, ge=1)
    """Side in pixels. null takes the model's own, if it has one."""
    channels: int | None = Field(None, ge=1, le=4)
    """1 is grey, 3 is RGB. null takes the model's own, if it has one."""
    workers: int = Field(0, ge=0, le=512)
    """Processes that prepare batches; 0 prepares them in the training's own. The result is the same for any number."""
    sampling: Literal["shuffle", "balanced"] = "shuffle"
    """balanced draws every class equally often, samples of small ones several times per epoch; for data sets that know
    their labels without reading the samples."""
    augment: list[str | dict[str, dict[str, Any]]] = Field(default_factory=list)
    """Random changes to the training images, in order, by their torchvision.transforms.v2 names: a bare name, or
    `{RandomCrop: {padding: 4}}` with arguments."""

    @field_validator("augment")
    @classmethod
    def check_augment(
        cls, entries: list[str | dict[str, dict[str, Any]]]
    ) -> list[str | dict[str, dict[str, Any]]]:
        for entry in entries:
            if isinstance(entry, dict) and len(entry) != 1:
                raise ValueError(
                    "give each augmentation its own list item: a name, or one {Name: {argument: value}}"
                )
            name = entry if isinstance(entry, str) else next(iter(entry))
            if name not in AUGMENTATIONS:
                plain = name.casefold().replace("_", "").replace("-", "")
                spelt = {one.casefold(): one for one in AUGMENTATIONS}
                nearest = get_close_matches(plain, [*spelt, "mixup", "cutmix"], n=1, cutoff=0.5)
                hint = (
                    f"; did you mean {spelt[nearest[0]]}?"
                    if nearest and nearest[0] in spelt
                    else "."
                )
                if nearest and nearest[0] not in spelt:
                    hint = f": it mixes samples of a batch; a classifier has task.{nearest[0]}=1.0 for it."
                raise ValueError(
                    f"no augmentation {name!r}{hint} Allowed: {', '.join(AUGMENTATIONS)}"
                )
        return entries


LARGEST_RATE = 1e30
"""Adam multiplies a rate by up to 1e4 and more in its first step; float32 ends at 3.4e38."""


class ParameterGroup(Options):
    """The change for some of the parameters; null leaves it unchanged for all."""

    lr_scale: float | None = Field(None, ge=0, le=1000)
    """The learning rate there, as a multiple of the run's."""
    weight_decay: float | None = Field(None, ge=0)
    """The optimizer's weight decay there."""
    momentum: float | None = Field(None, ge=0, lt=1)
    """The optimizer's momentum there, if it has one."""
    eps: float | None = Field(None, gt=0)
    """The optimizer's eps there, if it has one."""


class OptimizerOptions(Options):
    """Settings that every optimizer has, in addition to its own."""

    splits_matrices: ClassVar[bool] = False
    """Whether the optimizer treats hidden matrices by themselves and wants them in groups marked `muon`."""
    gains_by_fusing: ClassVar[bool] = False
    """Whether torch's fused kernel passes over memory much less often than the others do."""

    lr: float = Field(1e-3, gt=0)
    """Learning rate, at its highest if there is a schedule."""
    clip_grad_norm: float | None = Field(None, gt=0)
    """Limit of the norm of all gradients of one optimizer together, measured after unscaling."""
    schedule: Literal["constant", "cosine", "linear", "one_cycle"] = "constant"
    """How the learning rate goes over the run, as a function of the step alone."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate first rises from zero."""
    phases: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Changes per trained module: `phases: {disc: {lr: 4e-4}}`."""
    parts: dict[str, ParameterGroup] = Field(default_factory=dict)
    """Changes per glob over dotted parameter names: `parts: {"net.trunk.*": {lr_scale: 0.1, weight_decay: 0}}`. If
    several match a parameter, the later ones win."""
    no_decay: list[Literal["bias", "norm", "vector"]] = Field(default_factory=list)
    """Parameters without weight decay: biases, those of normalisation layers, and as vector those of one dimension and
    those that the network's `no_weight_decay()` names, as timm does it. `parts` may say otherwise."""

    @field_validator("lr", check_fields=False)
    @classmethod
    def fits_float32(cls, rate: float) -> float:
        """Refuse a rate whose step could not be computed in float32."""
        if rate > LARGEST_RATE:
            raise ValueError(f"a number up to {LARGEST_RATE:g}")
        return rate


class PrecisionOptions(Options):
    """Settings that every precision mode has. A mode's own `Settings` narrows those that it cannot honour."""

    dtype: Literal["auto", "float16", "bfloat16"] = "auto"
    """auto is float16 on a GPU and bfloat16 on a CPU; the reason is printed and recorded."""
    loss_scale: Literal["auto", "dynamic"] | Annotated[float, Field(gt=0)] = "auto"
    """auto is dynamic in float16 and none otherwise; a number is a scale that never changes, 1 is none."""
    init_scale: float = Field(65536.0, gt=0)
    """The first value of a dynamic scale."""
    growth_interval: int = Field(2000, gt=0)
    """Steps without overflow after which a dynamic scale doubles."""
    min_scale: float = Field(1.0, gt=0)
    """The floor of a dynamic scale."""
    max_scale: float = Field(2.0**24, gt=0)
    """The ceiling of a dynamic scale."""
    at_min_scale: Literal["stop", "fall_back"] = "stop"
    """At the floor with overflow still there: stop with exit 6, or continue in bfloat16."""
    keep_fp32: list[str] = Field(default_factory=list)
    """Globs over module names ("gen.layers.*") that stay in float32: inputs cast up, autocast off."""
    auto_keep_fp32: bool = False
    """If a step is not finite, or the scale at its floor, look for the fewest modules that must be in float32 for it
    to be finite, and keep them so from then on, at most `train.max_rollbacks` times."""
    stable_forms: list[StableForm] = Field(default_factory=list)
    """Numerically poor forms that are computed by stable ones wherever they occur, without an edit of the model: `log`
    log(softmax(x)) and the like; `cross_entropy` BCELoss of sigmoid(x); `softmax` exp(x) / sum(exp(x)), softmax(c * x);
    `norm` sqrt(sum(x**2)); `variance` E[x**2] - E[x]**2; `distance` a**2 + b**2 - 2ab; `divide_first` sum(x) / n,
    (a @ b) / n; `epsilon` x + 1e-8, which is x in float16. mpt doctor says which help (docs/how-to/doctor.md)."""
    losses: Literal["float32", "inherit"] = "float32"
    """Whether loss functions run in float32 or in the mode's dtype."""
    matmul: Literal["auto", "ieee", "tf32", "bf16x3"] = "auto"
    """The arithmetic of float32 products on a GPU. auto is the mode's, else torch's own: ieee, and tf32 in
    convolutions."""
    fp16_accumulation: bool = False
    """Let products of float16 add up in float16: up to twice as fast on GeForce cards, and less exact."""
