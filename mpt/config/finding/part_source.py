"""Declarations of one source file, read without running the file.

The file is parsed, never imported: of its top level, only imports of a few light modules (`ALLOWED_IMPORTS`), the
classes that hold settings or a command's arguments, and assignments that use nothing but these are executed, so that
`mpt validate`, `mpt list` and `mpt --help` answer without torch. `NAMES`, `TASK` and the other `LITERALS` are read as
literals; see `mpt.config.options` for their meaning.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError
from pydantic.errors import PydanticUndefinedAnnotation

from mpt.config.options import DatasetOptions, OptimizerOptions, Options, PrecisionOptions
from mpt.foreign.files import LARGEST_SOURCE_BYTES, read_text

ALLOWED_IMPORTS = (
    "__future__",
    "annotated_types",
    "dataclasses",
    "math",
    "mpt.commands.arguments",  # until it moved: tried, so that the answer names its place
    "mpt.commands.cli.arguments",
    "mpt.commands.cli.completion",
    "mpt.config",
    "pathlib",
    "pydantic",
    "typer",
    "typing",
)
LITERALS = (  # the second line: see mpt.memory.relieving.relief, the third: mpt.planner.recipes.lighter_modes
    *(
        "NAMES",
        "TASK",
        "CONFLICTS",
        "SHARDED",
        "EMA",
        "MOVED",
        "DATASET",
        "PATHS",
        "INFER_OPTIONS",
        "ABOUT",
    ),
    *(
        "RELIEVES",
        "PROPOSALS",
        "DIALS",
        "LADDER",
        "RANK",
        "IN_PARTS",
        "LOSSY",
        "POINTLESS_ON",
        "ENVIRONMENT",
    ),
    *("HOLDS_FLOAT32", "NEEDS_BFLOAT16", "SCALED"),
)
FORMS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("TASK", "DATASET"), ((str,), "a name, in quotes")),
    **dict.fromkeys(
        ("SHARDED", "LOSSY", "IN_PARTS", "HOLDS_FLOAT32"), ((bool, int), "True or False")
    ),
    **dict.fromkeys(
        ("PATHS", "PROPOSALS", "DIALS", "NEEDS_BFLOAT16", "SCALED", "INFER_OPTIONS"),
        ((tuple, list), 'a tuple, as ("one",)'),
    ),
    **dict.fromkeys(
        ("NAMES", "CONFLICTS", "EMA", "MOVED", "ABOUT", "POINTLESS_ON", "ENVIRONMENT"),
        ((dict,), 'a dict, as {"one": ...}'),
    ),
    "RANK": ((int, float), "a number"),
}
"""Literal -> the types that it may have, and in words."""
SHARED = "_settings"
"""The ending of a module's name whose settings several parts share: it imports nothing but these either."""
SETTINGS, COMMAND = "Settings", "Command"
"""The class that makes a file a part: its settings in YAML, or in the folder `commands` its arguments."""
FAMILIES = {"data": DatasetOptions, "optim": OptimizerOptions, "precision": PrecisionOptions}
"""Folder -> the class from which its settings derive, since the engine reads some of each; Options elsewhere."""


@dataclass(frozen=True)
class PartSource:
    """Declarations of one source file."""

    names: Mapping[str, Mapping[str, Any]]
    """The names it may be chosen by, each with the defaults that it changes."""
    description: str
    """The first paragraph of the file's docstring, as one line."""
    declared: type[Any]
    """The class `Settings`, or `Command`."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """The file's descriptions of the fields of that class."""
    literals: Mapping[str, Any] = field(default_factory=dict)
    """The values of the `LITERALS` that the file has."""


def read_source(
    source: str, path: Path, module_name: str, wanted: str = SETTINGS
) -> PartSource | None:
    """Return a source file's declarations, or None if it has no top-level class of the wanted name.

    Raises whatever its allowed statements raise, SyntaxError, and TypeError for a class of another family.
    """
    if f"class {wanted}" not in source:
        return None
    tree = ast.parse(source, filename=str(path))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    if not any(node.name == wanted for node in classes):
        return None
    declared = _execute(tree, path, module_name, wanted)
    literals = read_literals(tree)
    check_literals(path, literals, declared)
    notes = dict(_option_notes()) if wanted == SETTINGS else {}
    for base in declared.__mro__[1:]:
        if base.__module__.endswith(SHARED):
            notes.update(
                read_notes(Path(str(sys.modules[base.__module__].__file__)), base.__name__)
            )
    for node in classes:
        notes.update(_notes(node) if wanted == SETTINGS or node.name == COMMAND else {})
    fields = (
        declared.model_fields
        if issubclass(declared, Options)
        else vars(declared)["__dataclass_fields__"]
    )
    return PartSource(
        names=literals.pop("NAMES", {path.stem: {}}),
        description=describe(tree),
        declared=declared,
        notes={name: note for name, note in notes.items() if name in fields},
        literals=literals,
    )


def describe(tree: ast.Module) -> str:
    """Return the first paragraph of a source's docstring, as one line."""
    return " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())


def read_description(path: Path) -> str:
    """Return the first paragraph of a file's docstring, as one line."""
    return describe(ast.parse(read_text(path, LARGEST_SOURCE_BYTES)))


def declares_function(source: str, name: str, parameters: Sequence[str]) -> bool:
    """Has a source a top-level function of that name and with these parameters? () allows any parameters."""
    if f"def {name}" not in source:
        return False
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name == name
        and (
            [argument.arg for argument in node.args.args] == list(parameters)
            if parameters
            else node.args.args
        )
        for node in ast.parse(source).body
    )


def _execute(tree: ast.Module, path: Path, module_name: str, wanted: str) -> type[Any]:
    """Run the allowed imports and the wanted classes of a file, in order, in a module that is in for it."""
    # no importable name, so the two can never be mistaken
    stand_in = ModuleType(f"{__name__}:{module_name}:{path}")
    stand_in.__file__ = str(path)
    sys.modules[stand_in.__name__] = stand_in  # pydantic resolves annotations through it
    for node in tree.body:
        known = vars(stand_in)
        is_wanted = isinstance(node, ast.ClassDef) and (
            _is_options_class(node, known) or node.name == COMMAND
        )
        if not (is_wanted or _is_allowed_import(node) or _is_plain_assignment(node, known)):
            continue
        code = compile(
            ast.Module([_future_annotations(), node], []), str(path), "exec", dont_inherit=True
        )
        exec(code, vars(stand_in))
    declared = vars(stand_in).get(wanted)
    family = FAMILIES.get(path.parent.name, Options)
    if wanted == SETTINGS and not (isinstance(declared, type) and issubclass(declared, family)):
        raise TypeError(
            f"{path}: {wanted} does not derive from {family.__name__}, which is in mpt.config.options"
        )
    if wanted == COMMAND and not (
        isinstance(declared, type) and "__dataclass_fields__" in vars(declared)
    ):
        raise TypeError(f"{path}: {wanted} is no dataclass")
    assert isinstance(declared, type)
    if wanted == SETTINGS:
        check_settings(path, declared)
    return declared


def check_settings(path: Path, declared: type[Options]) -> None:
    """Raise TypeError for settings with an annotation that is not known here, or a default that they do not allow."""
    try:
        declared.model_rebuild()
        declared()
    except PydanticUndefinedAnnotation as error:
        raise TypeError(
            f"{path}: {SETTINGS} has an annotation with {error.name}, which is not known there: settings are read "
            "without running the file, and may use typing, pydantic, pathlib and mpt.config alone"
        ) from error
    except ValidationError as error:
        for one in error.errors():
            # without a value that has no default, or that depends on others, there is nothing to say
            if one["loc"] and one["type"] not in ("missing", "value_error", "assertion_error"):
                raise TypeError(
                    f"{path}: the default of {SETTINGS}.{one['loc'][0]}, {one['input']!r}, is not allowed: {one['msg']}"
                ) from error


def _future_annotations() -> ast.ImportFrom:
    node = ast.ImportFrom(module="__future__", names=[ast.alias("annotations")], level=0)
    return ast.fix_missing_locations(node)


def _is_allowed_import(node: ast.stmt) -> bool:
    def allowed(name: str) -> bool:
        return name.endswith(SHARED) or any(
            name == root or name.startswith(root + ".") for root in ALLOWED_IMPORTS
        )

    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and node.module is not None and allowed(node.module)
    return isinstance(node, ast.Import) and all(allowed(alias.name) for alias in node.names)


def _is_options_class(node: ast.ClassDef, known: Mapping[str, Any]) -> bool:
    bases = [known.get(base.id) for base in node.bases if isinstance(base, ast.Name)]
    return any(isinstance(base, type) and issubclass(base, Options) for base in bases)


def _is_plain_assignment(node: ast.stmt, known: Mapping[str, Any]) -> bool:
    """Is this `Kind = Literal["a", "b"]` or the like, made only of constants and names that are known here?"""
    if not isinstance(node, ast.Assign):
        return False
    return all(part.id in known for part in ast.walk(node.value) if isinstance(part, ast.Name))


def read_literals(tree: ast.Module) -> dict[str, Any]:
    """Return the values of top-level assignments to the names of `LITERALS`."""
    found: dict[str, Any] = {}
    for node in tree.body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        for target in targets:
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and target.id in LITERALS and value is not None:
                try:
                    found[target.id] = ast.literal_eval(value)
                except ValueError as error:
                    raise ValueError(
                        f"{target.id} in line {node.lineno} must be written out: the file is read without running it"
                    ) from error
    return found


def check_literals(path: Path, literals: Mapping[str, Any], declared: type[Any]) -> None:
    """Raise TypeError for a literal of another type than its readers expect."""
    for name, value in literals.items():
        types, words = FORMS.get(name, ((object,), ""))
        if not isinstance(value, types):
            raise TypeError(f"{path}: {name} is {value!r}; expected {words}")
        if name == "NAMES":
            check_names(path, literals[name], getattr(declared, "model_fields", {}))


def check_names(path: Path, names: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise TypeError for a name that changes no setting, or nothing in the form of settings."""
    for name, changed in names.items():
        wrong = [] if isinstance(changed, dict) else [changed]
        wrong = wrong or [key for key in changed if key not in known]
        if wrong:
            raise TypeError(
                f"{path}: NAMES gives {name!r} {wrong[0]!r}, which is none of its settings; expected a dict of "
                "defaults that this name changes, {} for none"
            )


def _notes(node: ast.ClassDef) -> dict[str, str]:
    """Return the string that follows each annotated field of a class body, as one line."""
    notes: dict[str, str] = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            notes[statement.target.id] = " ".join(str(following.value.value).split())
    return notes


@cache
def read_notes(path: Path, class_name: str | None = None) -> Mapping[str, str]:
    """Return a source file's notes on the fields of its classes, or of one of them, by field name."""
    notes: dict[str, str] = {}
    for node in ast.parse(read_text(path, LARGEST_SOURCE_BYTES)).body:
        if isinstance(node, ast.ClassDef) and class_name in (None, node.name):
            notes.update(_notes(node))
    return notes


def _option_notes() -> Mapping[str, str]:
    return read_notes(Path(__file__).parents[1] / "options.py")
