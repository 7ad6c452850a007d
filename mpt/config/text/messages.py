"""The words of a configuration error: the value found, the allowed values, and the nearest right name.

One line per mistake, whatever pydantic makes of it: the branches of a union are reported together, and text from the
file is printed without control characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mpt.config.text.yaml_text import KeyPath, Node, Place, Problem, printable

ALLOWED: dict[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text, in quotes if it looks like something else",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "none_required": "null",
    "finite_number": "a finite number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number not below {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number not above {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "path_type": "a path",
}
"""pydantic's error type -> the allowed values, in words, with the names of its context in braces."""


def distance(first: str, second: str) -> int:
    """Return how many letters to add, remove, change or swap with their neighbour (optimal string alignment)."""
    before: list[int] = []
    previous = list(range(len(second) + 1))
    for row, letter in enumerate(first, start=1):
        current = [row]
        for column, other in enumerate(second, start=1):
            cost = min(
                previous[column] + 1, current[-1] + 1, previous[column - 1] + (letter != other)
            )
            if row > 1 and column > 1 and letter == second[column - 2] and first[row - 2] == other:
                cost = min(cost, before[column - 2] + 1)
            current.append(cost)
        before, previous = previous, current
    return previous[-1]


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that was probably meant, or None if nothing is near."""
    if len(word) > 60:
        return None
    folded = word.casefold().replace("-", "_")
    ranked = sorted(
        (distance(folded, name.casefold().replace("-", "_")), name) for name in candidates
    )
    if ranked and ranked[0][0] <= max(1, len(word) // 3):
        return ranked[0][1]
    words = {*folded.split("_")}
    longer = [
        name for _, name in ranked if words <= {*name.split("_")} or words > {*name.split("_")}
    ]
    return longer[0] if len(longer) == 1 else None


def describe(node: Node | None) -> str:
    """Return a found value in words."""
    if node is None:
        return "nothing"
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, list):
        return "a list"
    if isinstance(node.value, str):
        return f"'{printable(node.value)}'"
    if node.value is None or isinstance(node.value, bool):
        return {None: "null", True: "true", False: "false"}[node.value]
    return str(node.value)


def unknown_name(word: str, allowed: Sequence[str], meant: str | None = None) -> str:
    """Return the words for a name that does not exist; `meant` is its meaning elsewhere, if the caller knows one."""
    guess = nearest(word, allowed)
    hint = f"; did you mean '{guess}'?" if guess else ""
    if meant:
        hint = f"; did you mean {meant}?"
    return f"found '{printable(word)}'; allowed: one of {', '.join(allowed) or '(there are none)'}{hint}"


def few(names: Sequence[object], most: int) -> str:
    """Return the first names, and how many more there are: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


PRETRAINED = ("pretrained", "checkpoint_path", "pretrained_cfg")
"""Keys by which other programs have to fetch weights."""


PASSES = (
    "accumulate_grad_batches",
    "gradient_accumulation_steps",
    "grad_accum_steps",
    "accumulate",
)
"""Other programs' names of the number of passes that a step consists of."""


BASES = ("base", "_base_", "defaults", "extends", "inherit", "include")
"""Other programs' keys for the file that one is written on top of."""


FOLDERS = ("root", "path", "folder", "data_dir", "train_dir")
"""Names of the folder of a data set."""

FOREIGN = MappingProxyType(
    {
        **dict.fromkeys(
            ("save_every", "save_steps", "save_freq", "save_period", "save_interval"),
            "train.checkpoint_every",
        ),
        **dict.fromkeys(
            ("eval_steps", "eval_every", "val_interval", "val_check_interval"),
            "train.evaluate_every",
        ),
        **dict.fromkeys(
            ("logging_steps", "print_freq", "log_interval", "log_every_n_steps"), "train.log_every"
        ),
        **dict.fromkeys(
            ("max_epochs", "num_epochs", "num_train_epochs", "n_epochs"), "train.epochs"
        ),
        **dict.fromkeys(("max_steps", "num_steps", "max_iters", "iterations"), "train.steps"),
        **dict.fromkeys(
            ("bs", "batch", "batchsize", "per_device_train_batch_size"), "train.batch_size"
        ),
        **dict.fromkeys(("num_workers", "dataloader_num_workers"), "dataset.workers"),
        **dict.fromkeys(("save_total_limit", "save_top_k", "max_to_keep"), "train.keep_last"),
        **dict.fromkeys(("imgsz", "img_size", "input_size", "resolution"), "model.image_size"),
        **dict.fromkeys(("patience", "early_stopping_patience"), "train.early_stopping.patience"),
        **dict.fromkeys(
            ("gradient_clip_val", "max_grad_norm", "clip_grad", "clip_grad_norm"),
            "optimizer.clip_grad_norm",
        ),
        **dict.fromkeys(
            ("accumulate_grad_batches", "gradient_accumulation_steps"), "memory.micro_batch"
        ),
        **dict.fromkeys(("seed_everything", "random_seed"), "seed"),
        **dict.fromkeys(("smoothing", "label_smoothing"), "task.label_smoothing"),
        **dict.fromkeys(("lr0", "learning_rate"), "optimizer.lr"),
        "limit_train_batches": "train.steps",
    }
)
"""Other trainers' names of a setting -> ours, in files and on the command line."""


def unknown_key(key: str, allowed: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """Return the words for a key that does not exist; `elsewhere` maps keys of other sections to their full paths."""
    outer, dot, inner = key.partition(".")
    foreign = FOREIGN.get(key, "")
    ours = foreign.rpartition(".")[2]
    guess = ours if ours in allowed else nearest(key, allowed) or elsewhere.get(key) or foreign
    hint = f"; did you mean '{guess}'?" if guess else ""
    if key in PASSES:
        hint = "; train.batch_size is the batch that is optimised, all passes together, and memory.micro_batch one pass"
    if guess == key:  # a key of the top level, written into a section
        hint = f"; '{key}' stands at the top level, beside the sections"
    if key in PRETRAINED and "weights" in allowed:
        hint = "; nothing is downloaded: write weights: PATH with a local file (.safetensors, .pth)"
    if key in FOLDERS and "root" not in allowed and {"name", "workers"} <= {*allowed}:
        hint = "; this data set takes no folder: your own pictures are dataset.name=image_folder dataset.root=FOLDER"
    if key in BASES and "seed" in allowed:
        hint = (
            "; a file continues no other: name both, as in `mpt train @classify_digits --with FILE`"
        )
    if dot and inner and outer in allowed:  # the command line's spelling in a file
        hint = f"; in a file it is written '{outer}: {{{printable(inner)}: ...}}'"
    return f"unknown key '{printable(key)}'; allowed: {', '.join(allowed) or 'no keys'}{hint}"


def explain_errors(
    errors: Iterable[Mapping[str, Any]],
    node: Node,
    path: KeyPath,
    keys: Sequence[str],
    elsewhere: Mapping[str, str],
    inner: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[Problem]:
    """Turn pydantic's errors about one section into problems with places.

    `node` is the section, `path` its own path, `keys` the keys that are allowed in it, `inner` those that are allowed
    in the mappings under some of them.
    """
    grouped: dict[KeyPath, list[Mapping[str, Any]]] = {}
    for error in errors:
        grouped.setdefault(_real_path(error, node), []).append(error)
    return [
        Problem(
            _place(node, where, group),
            path + where,
            _text(node, where, group, keys, elsewhere, inner),
        )
        for where, group in grouped.items()
    ]


def _real_path(error: Mapping[str, Any], node: Node) -> KeyPath:
    """Return an error's path without the labels that pydantic adds for the branches of a union."""
    if error["type"] == "missing":
        return tuple(error["loc"])
    path: list[str | int] = []
    for part in error["loc"]:
        child = _child(node, part)
        if child is None:
            break
        node = child
        path.append(part)
    return tuple(path)


def _child(node: Node, part: str | int) -> Node | None:
    if isinstance(node.value, dict):
        return node.value.get(str(part))
    if isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
        return node.value[part]
    return None


def _find(node: Node, path: KeyPath) -> Node | None:
    found: Node | None = node
    for part in path:
        found = _child(found, part) if found else None
    return found


def _place(node: Node, path: KeyPath, group: Sequence[Mapping[str, Any]]) -> Place:
    found = _find(node, path)
    if found is None:
        parent = _find(node, path[:-1]) or node
        return parent.key_place or parent.place
    if group[0]["type"] == "extra_forbidden":
        return found.key_place or found.place
    return found.place


def _text(
    node: Node,
    path: KeyPath,
    group: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
    elsewhere: Mapping[str, str],
    inner: Mapping[str, Sequence[str]],
) -> str:
    first = group[0]
    if first["type"] == "extra_forbidden":
        return unknown_key(
            str(path[-1]), keys if len(path) == 1 else inner.get(str(path[0]), []), elsewhere
        )
    if first["type"] == "missing":
        return "missing; " + (
            "it has no default"
            if isinstance(path[-1], str)
            else "allowed: a list with this item too"
        )
    if first["type"] == "value_error":
        cause = first.get("ctx", {}).get("error", first["msg"])
        found_there = f"; found {describe(_find(node, path))}" if path else ""
        return f"{printable(str(cause), 300)}{found_there}"
    allowed = list(dict.fromkeys(_allowed(error) for error in group))
    found = _find(node, path)
    choices = [
        name
        for error in group
        for name in re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
    ]
    guess = nearest(found.value, choices) if found and isinstance(found.value, str) else None
    hint = f"; did you mean '{guess}'?" if guess else ""
    return f"found {describe(found)}; allowed: {' or '.join(allowed)}{hint}"


def _allowed(error: Mapping[str, Any]) -> str:
    words = ALLOWED.get(error["type"])
    limits = {
        name: f"{v:g}" if isinstance(v, float) else v for name, v in error.get("ctx", {}).items()
    }
    return words.format(**limits) if words else str(error["msg"])
