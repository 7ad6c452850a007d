"""Values of `crossed_steps.DIMENSIONS` that do not go together, and why: each rule is checked.

What real PyTorch refuses on a CPU, a plan need not follow (`IMPOSSIBLE`). What it refuses on a card alone, and the few
things that a plan refuses itself, are refused by a plan in these words (`REFUSED`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from mpt.planner.device.sparse_rows import HAS_NORM
from tests.planner.own.crossed_steps import DIMENSIONS

PRECISIONS = tuple(DIMENSIONS["precision"])
STATISTICS = ("convolutions", "channels_last", "depthwise", "frozen", "tables")
TRANSFORMS = ("function_gradients", "gradients_of_each")
TWICE = ("penalized", "product_with_hessian")
DENSE = (
    *("adam", "adam_for_loop", "adamw_foreach", "adamw_fused", "amsgrad", "capturable", "radam"),
    *("tensor_rate", "rmsprop", "adafactor", "rprop", "asgd", "nadam", "adamax", "adadelta"),
    *("muon", "in_groups", "in_backward", "sgd_fused"),
)


@dataclass(frozen=True)
class Rule:
    """Values that do not go together."""

    words: str
    """A regular expression for the error."""
    values: Mapping[str, tuple[str, ...]]

    def applies(self, combination: Mapping[str, str]) -> bool:
        """Return whether a combination has such values."""
        return all(combination.get(name) in values for name, values in self.values.items())

    def combinations(self) -> Iterator[dict[str, str]]:
        """Yield all that it says."""
        for chosen in product(*self.values.values()):
            yield dict(zip(self.values, chosen, strict=True))


def rule(words: str, **values: tuple[str, ...]) -> Rule:
    """Return a rule from its values as arguments."""
    return Rule(words, values)


IMPOSSIBLE = (
    rule("in-place", network=STATISTICS, trick=TRANSFORMS),
    rule("setup_context", network=("own_function",), trick=TRANSFORMS),
    rule(
        "vmap: ",
        trick=("gradients_of_each",),
        loss=(
            "divergence",
            "outliers",
            "probability",
            "angles",
            "binary",
            "squares",
            "huber",
            "gaussian",
            "absolute",
            "margin",
        ),
    ),
    rule("broadcast shape", network=("gru", "long_cells"), trick=("gradients_of_each",)),
    rule(
        "broadcast shape",
        network=("lstm",),
        trick=("gradients_of_each",),
        precision=PRECISIONS[1:],
    ),
    rule(
        "expected scalar type",
        network=("tied", "encoder", "passed_on", "translator"),
        trick=("gradients_of_each",),
        precision=("autocast", "float16", "norms_in_float32", "island"),
    ),
    rule(
        "expected scalar type",
        network=("decoder",),
        trick=("gradients_of_each",),
        precision=("norms_in_float32",),
    ),
    rule(
        "expected scalar type",
        network=("encoder", "translator"),
        trick=("function_gradients",),
        precision=("autocast", "float16", "island"),
    ),
    rule("sparse", network=("looked_up",), optimizer=DENSE),
    rule("Sparse", network=("looked_up",), clip=("value",)),
    *(
        ()
        if HAS_NORM
        else [rule("Sparse", network=("looked_up",), clip=("norm", "norm_for_loop", "largest"))]
    ),
    rule("Sparse", network=("looked_up",), trick=("gradients_of_each",)),
    rule("deepcopy protocol", network=("old_weight_norm",), afterwards=("follow", "average")),
    rule(
        "deepcopy protocol",
        network=("old_weight_norm",),
        afterwards=("average_quickly", "copy_all"),
    ),
    rule("inplace operation", optimizer=("in_backward",), trick=("backward_twice",)),
    rule("is not compatible", network=("channels_last",), optimizer=("lbfgs", "line_search")),
    rule("derivative for .*sigmoid_backward", network=("depthwise",), trick=TWICE),
    rule("derivative for .*_attention_for_cpu", network=("decoder",), trick=TWICE),
    rule("same dtype", network=("spectral_norm",), precision=("norms_in_float32",)),
    rule("same dtype", network=("transposed",), precision=("autocast", "float16")),
    rule(
        "expected scalar type",
        network=("translator",),
        afterwards=("evaluate", "infer"),
        precision=("autocast", "float16", "norms_in_float32", "island"),
    ),
)
REFUSED = (
    rule(
        "tensors of one dtype",  # a card's kernels of layer and group norms take no others
        network=("encoder", "decoder", "tied", "unet", "translator", "passed_on"),
        precision=("norms_in_float32",),
    ),
    rule("unsafe to autocast", loss=("probability",), precision=("autocast", "float16", "island")),
    rule("derivative for .*_attention", network=("encoder", "translator"), trick=TWICE),
    rule("two sparse tensors", network=("looked_up",), trick=("product_with_hessian",)),
    rule(
        "sum of sparse gradients that is kept",
        network=("looked_up",),
        optimizer=("nesterov", "sgd_for_loop", "of_two_kinds"),
    ),
)


def is_excluded(combination: Mapping[str, str]) -> bool:
    """Return whether a combination has values that do not go together."""
    return any(one.applies(combination) for one in (*IMPOSSIBLE, *REFUSED))
