"""Which models, data sets, precision modes, memory tricks, optimizers and tasks there are, found without running them.

A plugin is a file in its room's folder that declares `class Settings`. The file is parsed, never imported: of its top
level, only imports of a few light modules (`ALLOWED_IMPORTS`), classes that derive from `Options`, and assignments that
use nothing but these are executed, so that `mpt validate` and `mpt list` answer without torch. `Plugin.load` imports
the real module when it is to be run.

`NAMES`, `TASK` and `CONFLICTS` are read as literals. See `mpt.config.options` for what they mean.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mpt.config.options import Options

ROOMS = ("nn", "tasks", "data", "precision", "memory", "optim")
ALLOWED_IMPORTS = ("__future__", "annotated_types", "math", "mpt.config", "pydantic", "typing")
PACKAGE_FOLDER = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, eq=False)
class Plugin:
    """One name that may be written in YAML, and the file behind it."""

    room: str
    name: str
    path: Path
    module_name: str
    description: str
    """The first paragraph of the file's docstring, as one line."""
    settings_class: type[Options]
    """Read from the source. The imported module has an equal class of its own: see `native_settings`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What this name changes in the defaults of `Settings`."""
    task: str | None = None
    conflicts: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What the file says about its settings, by field name."""

    def load(self) -> ModuleType:
        """Import the plugin's module and return it."""
        return importlib.import_module(self.module_name)

    def native_settings(self, settings: Options) -> Any:
        """Return the settings in the imported module's own class, which pickles and passes isinstance."""
        return self.load().Settings.model_validate(settings.model_dump())


@dataclass(frozen=True)
class _File:
    """What one source file declares."""

    names: Mapping[str, Mapping[str, Any]]
    description: str
    settings_class: type[Options]
    task: str | None
    conflicts: Mapping[str, str]
    notes: Mapping[str, str]


@dataclass(frozen=True)
class PartPackage:
    """A folder with the layout of `mpt` itself: `nn/ tasks/ data/ ...`, each file one part."""

    folder: Path
    module_name: str
    """How its parts are imported: `mpt`, `mpt.systems.stylegan2`."""

    def paths(self, room: str) -> list[Path]:
        """Return the files of a room, sorted."""
        return sorted(path for path in (self.folder / room).glob("*.py") if not path.name.startswith("_"))


def packages_below(folder: Path, module_name: str) -> list[PartPackage]:
    """Return a package and the systems inside it."""
    systems = sorted(path.parent for path in (folder / "systems").glob("*/__init__.py"))
    return [
        PartPackage(folder, module_name),
        *(PartPackage(system, f"{module_name}.systems.{system.name}") for system in systems),
    ]


class Registry:
    """The parts of several part packages. `INSTALLED` is `mpt` and the systems inside it."""

    def __init__(self, folder: Path = PACKAGE_FOLDER, package: str = "mpt") -> None:
        self.packages = packages_below(folder, package)
        self.files: dict[Path, tuple[int, _File | None]] = {}

    def find(self, room: str, name: str) -> Plugin | None:
        """Return the plugin of that name, or None. A name with a colon is a model from another package."""
        assert room in ROOMS, room
        if room == "nn" and ":" in name:
            own = self.packages[0]
            external = self._read(own.folder / "nn" / "external.py", own)
            return self._plugin(room, name, own.folder / "nn" / "external.py", own, external) if external else None
        for path, package in self._candidates(room, name):
            file = self._read(path, package)
            if file and name in file.names:
                return self._plugin(room, name, path, package, file)
        return None

    def names(self, room: str) -> list[str]:
        """Return every name of a room, sorted. Models of other packages are not among them."""
        assert room in ROOMS, room
        files = [(path, self._read(path, package)) for path, package in self._paths(room)]
        return sorted({name for path, file in files if file and path.name != "external.py" for name in file.names})

    def _paths(self, room: str) -> list[tuple[Path, PartPackage]]:
        return [(path, package) for package in self.packages for path in package.paths(room)]

    def _candidates(self, room: str, name: str) -> list[tuple[Path, PartPackage]]:
        """Put the file that is probably meant first, so that the others need not be parsed."""
        own = [(path, package) for path, package in self._paths(room) if path.name != "external.py"]
        return sorted(own, key=lambda one: one[0].stem != name)

    def _read(self, path: Path, package: PartPackage) -> _File | None:
        try:
            changed = path.stat().st_mtime_ns
        except OSError:
            return None
        if path not in self.files or self.files[path][0] != changed:
            module_name = f"{package.module_name}.{path.parent.name}.{path.stem}"
            self.files[path] = (changed, _read_source(path.read_text("utf-8"), path, module_name))
        return self.files[path][1]

    def _plugin(self, room: str, name: str, path: Path, package: PartPackage, file: _File) -> Plugin:
        return Plugin(
            room=room,
            name=name,
            path=path,
            module_name=f"{package.module_name}.{room}.{path.stem}",
            description=file.description,
            settings_class=file.settings_class,
            defaults=file.names.get(name, {}),
            task=file.task,
            conflicts=file.conflicts,
            notes=file.notes,
        )


def _read_source(source: str, path: Path, module_name: str) -> _File | None:
    """Return what a source file declares, or None where it has no top-level `class Settings`."""
    if "class Settings" not in source:
        return None
    tree = ast.parse(source, filename=str(path))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    if not any(node.name == "Settings" for node in classes):
        return None
    settings = _execute_settings(tree, path, module_name)
    literals = _literals(tree, ("NAMES", "TASK", "CONFLICTS"))
    documentation = ast.get_docstring(tree) or ""
    notes = dict(_option_notes())
    for node in classes:
        notes.update(_notes(node))
    return _File(
        names=literals.get("NAMES", {path.stem: {}}),
        description=" ".join(documentation.split("\n\n")[0].split()),
        settings_class=settings,
        task=literals.get("TASK"),
        conflicts=literals.get("CONFLICTS", {}),
        notes={name: note for name, note in notes.items() if name in settings.model_fields},
    )


def _execute_settings(tree: ast.Module, path: Path, module_name: str) -> type[Options]:
    """Run the allowed imports and the `Options` classes of a file, in order, in a module that stands in for it."""
    stand_in = ModuleType(f"{__name__}:{module_name}:{path}")  # no importable name, so the two can never be mistaken
    stand_in.__file__ = str(path)
    sys.modules[stand_in.__name__] = stand_in  # pydantic resolves annotations through it
    for node in tree.body:
        known = vars(stand_in)
        if not (_is_allowed_import(node) or _is_options_class(node, known) or _is_plain_assignment(node, known)):
            continue
        code = compile(ast.Module([_future_annotations(), node], []), str(path), "exec", dont_inherit=True)
        exec(code, vars(stand_in))
    settings = vars(stand_in).get("Settings")
    if not (isinstance(settings, type) and issubclass(settings, Options)):
        raise TypeError(f"{path}: Settings does not derive from Options")
    return settings


def _future_annotations() -> ast.ImportFrom:
    node = ast.ImportFrom(module="__future__", names=[ast.alias("annotations")], level=0)
    return ast.fix_missing_locations(node)


def _is_allowed_import(node: ast.stmt) -> bool:
    def allowed(name: str) -> bool:
        return any(name == root or name.startswith(root + ".") for root in ALLOWED_IMPORTS)

    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and node.module is not None and allowed(node.module)
    return isinstance(node, ast.Import) and all(allowed(alias.name) for alias in node.names)


def _is_options_class(node: ast.stmt, known: Mapping[str, Any]) -> bool:
    if not isinstance(node, ast.ClassDef):
        return False
    bases = [known.get(base.id) for base in node.bases if isinstance(base, ast.Name)]
    return any(isinstance(base, type) and issubclass(base, Options) for base in bases)


def _is_plain_assignment(node: ast.stmt, known: Mapping[str, Any]) -> bool:
    """Is this `Kind = Literal["a", "b"]` or the like, made only of constants and names that are known here?"""
    if not isinstance(node, ast.Assign):
        return False
    return all(part.id in known for part in ast.walk(node.value) if isinstance(part, ast.Name))


def _literals(tree: ast.Module, wanted: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of top-level assignments to the wanted names."""
    found: dict[str, Any] = {}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and target.id in wanted and value is not None:
                found[target.id] = ast.literal_eval(value)
    return found


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
def read_notes(path: Path) -> Mapping[str, str]:
    """Return what a source file says about the fields of its classes, by field name."""
    notes: dict[str, str] = {}
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            notes.update(_notes(node))
    return notes


def _option_notes() -> Mapping[str, str]:
    return read_notes(Path(__file__).with_name("options.py"))


INSTALLED = Registry()


def find(room: str, name: str) -> Plugin | None:
    """Return the package's own plugin of that name, or None."""
    return INSTALLED.find(room, name)


def names(room: str) -> list[str]:
    """Return the names of the package's own plugins of a room, sorted."""
    return INSTALLED.names(room)
