"""Which models, data sets, precision modes, memory tricks, optimizers and tasks there are, found without running them.

A part is a file in its subpackage that declares `class Settings`; its name in YAML is the file's name. The subpackages
are those of every part package (`mpt.config.finding.part_packages`), and the files are read as source
(`mpt.config.finding.part_source`). `Plugin.load` imports the real module when it is to be run.

In `commands/` of a system, or of a package from outside, the class is called `Command` and the part is a command of the
shell. Metrics and losses are functions: see `Registry.functions`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from mpt.config.finding.moved import explain_import
from mpt.config.finding.part_packages import KINDS, PartPackage, outside_packages, packages_below
from mpt.config.finding.part_source import (
    COMMAND,
    SETTINGS,
    PartSource,
    declares_function,
    read_source,
)
from mpt.config.options import CROSS_ENTROPY, Options
from mpt.errors import MptError, PartError, with_article
from mpt.foreign.files import LARGEST_SOURCE_BYTES, read_text

SUBPACKAGES = ("nn", "tasks", "data", "precision", "memory", "optim")
FUNCTIONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "metrics": ("metrics", "measure", ()),
    "losses": ("losses", "loss", ("logits", "labels")),
}
"""Parts that are a function: kind -> subpackage, and the name and parameters by which a file has one.

A metric's parameters are its own: the names of a task's evaluation outputs.
"""
WITHOUT_FILE = {"losses": (CROSS_ENTROPY,)}
"""Kind -> its names that are no file's."""
PACKAGE_FOLDER = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    """A file of a part package that can be imported."""

    subpackage: str
    name: str
    path: Path
    package: PartPackage = field(repr=False)

    @property
    def module_name(self) -> str:
        """How the file is imported."""
        return f"{self.package.module_name}.{self.subpackage}.{self.path.stem}"

    def load(self) -> ModuleType:
        """Import the part's module and return it. Raises PartError if a part from outside cannot be imported."""
        try:
            return importlib.import_module(self.module_name)
        except MptError:
            raise
        # a script's sys.exit() would end the command without a word
        except (Exception, SystemExit) as error:
            if not self.package.outside:
                raise
            reason = (
                explain_import(error) or f"{type(error).__name__}: {' '.join(str(error).split())}"
            )
            what = f"this {KINDS[self.subpackage]} cannot be imported: {reason}"
            raise PartError(f"{place(error, self.path)}: {what}") from error

    def member(self, name: str) -> Any:
        """Import the part and return its function or class of that name. Raises PartError if there is none."""
        module = self.load()
        if not hasattr(module, name):
            raise PartError(
                f"{self.path}: it has no {name}, which {with_article(KINDS[self.subpackage])} needs"
            )
        return getattr(module, name)

    def optional(self, name: str, default: Any = None) -> Any:
        """Import the part and return an optional declaration of its kind, or the default."""
        return vars(self.load()).get(name, default)


@dataclass(frozen=True, eq=False)
class Plugin(Part):
    """One name that may be written in YAML, and the file behind it."""

    description: str
    """The first paragraph of the file's docstring, as one line."""
    settings_class: type[Options]
    """Read from the source. The imported module has an equal class of its own: see `native_settings`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """This name's changes of the defaults of `Settings`."""
    task: str | None = None
    conflicts: Mapping[str, str] = field(default_factory=dict)
    literals: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Further declarations of the file that are read as literals (`mpt.config.finding.part_source`)."""
    notes: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The file's descriptions of its settings, by field name."""

    def native_settings(self, settings: Options) -> Any:
        """Return the settings in the imported module's own class, which pickles and passes isinstance."""
        return self.member(SETTINGS).model_validate(settings.model_dump())


@dataclass(frozen=True, eq=False)
class CommandPart(Part):
    """A command that a part package brings to the shell."""

    source: PartSource


class Registry:
    """The parts of several part packages: those below a folder, and those from outside of it.

    `INSTALLED` is `mpt`, the systems inside it, and the user's additions to this process (`use_parts`).
    """

    def __init__(
        self,
        folder: Path = PACKAGE_FOLDER,
        package: str = "mpt",
        outside: Callable[[], Sequence[PartPackage]] = lambda: (),
    ) -> None:
        self.inside = packages_below(folder, package)
        self.outside = outside
        self.files: dict[Path, tuple[int, PartSource | None]] = {}
        self.unique: set[tuple[str, tuple[PartPackage, ...]]] = set()

    @property
    def packages(self) -> list[PartPackage]:
        """Every part package, mpt's own first."""
        return [*self.inside, *self.outside()]

    def find(self, subpackage: str, name: str) -> Plugin | None:
        """Return the plugin of that name, or None. A name with a colon is a model from another package.

        Such a model is `nn/external.py`'s, unless another file has it among its `NAMES`.
        """
        assert subpackage in SUBPACKAGES, subpackage
        self._check_names(subpackage)
        # the probable one first
        paths = sorted(self._paths(subpackage), key=lambda one: one[0].stem != name)
        for path, package in paths:
            file = self._read(path, package) if path.stem == name else self._try(path, package)
            if file and name in file.names:
                return self._plugin(subpackage, name, path, package, file)
        if subpackage == "nn" and ":" in name:
            own = self.inside[0]
            path = own.folder / "nn" / "external.py"
            external = self._read(path, own)
            return self._plugin(subpackage, name, path, own, external) if external else None
        return None

    def names(self, subpackage: str) -> list[str]:
        """Return every name of a subpackage, sorted, but for those in files that cannot be read (see `check`).

        Models of other packages are not among them.
        """
        assert subpackage in SUBPACKAGES, subpackage
        self._check_names(subpackage)
        return sorted(
            name for package in self.packages for name in self._names(subpackage, package)
        )

    def check(self, subpackage: str) -> None:
        """Raise PartError for a file of the subpackage that cannot be read."""
        for path, package in self._paths(subpackage):
            self._read(path, package)

    def functions(self, kind: str) -> dict[str, Part]:
        """Return the files, by name, that have the function of a kind (see `FUNCTIONS`)."""
        subpackage, function, parameters = FUNCTIONS[kind]
        found: dict[str, Part] = {}
        for package in self.packages:
            for path in package.paths(subpackage):
                try:
                    if not declares_function(self._text(path, package), function, parameters):
                        continue
                except (SyntaxError, ValueError):
                    if not package.outside:
                        raise
                    continue  # one that is wrong stops only what uses it: see `why_no_function`
                if path.stem in WITHOUT_FILE.get(kind, ()):
                    raise taken(subpackage, path.stem, path)
                if path.stem in found:
                    raise taken(subpackage, path.stem, path, found[path.stem].path)
                found[path.stem] = Part(subpackage, path.stem, path, package)
        return dict(sorted(found.items()))

    def why_no_function(self, kind: str, name: str) -> str | None:
        """Return why a file from outside is no part of a kind although it has its name; None if there is no such
        file.
        """
        subpackage, function, parameters = FUNCTIONS[kind]
        for package in self.outside():
            for path in package.paths(subpackage):
                if path.stem != name:
                    continue
                try:
                    declares_function(self._text(path, package), function, parameters)
                except (SyntaxError, ValueError) as error:
                    words = str(error).partition(" (<")[0]
                    return f"a file that Python can read; {place(error, path)}: {words}"
                declared = f"{function}({', '.join(parameters) or '...'})"
                return f"a file that declares `{declared}`, which {path} does not"
        return None

    def commands(self) -> list[CommandPart]:
        """Return the commands that systems and packages from outside bring, of files that can be read."""
        found = []
        for path, package in self._command_paths():
            source = self._try(path, package, COMMAND)
            if source:
                found.append(CommandPart("commands", path.stem, path, package, source))
        return found

    def own_command(self, module: str) -> CommandPart:
        """Return a command of mpt's own, by its module below `mpt.commands`."""
        folder, _, stem = f"commands.{module}".rpartition(".")
        own = self.inside[0]
        path = own.folder.joinpath(*folder.split("."), f"{stem}.py")
        source = self._read(path, own, COMMAND)
        assert source is not None, path
        return CommandPart(folder, stem, path, own, source)

    def wrong_commands(self) -> list[tuple[PartPackage, str, PartError]]:
        """Return package, name and fault of the files of commands that cannot be read."""
        found = []
        for path, package in self._command_paths():
            try:
                self._read(path, package, COMMAND)
            except PartError as error:
                found.append((package, path.stem, error))
        return found

    def _command_paths(self) -> list[tuple[Path, PartPackage]]:
        return [
            (path, package) for package in self.packages[1:] for path in package.paths("commands")
        ]

    def _paths(self, subpackage: str) -> list[tuple[Path, PartPackage]]:
        return [
            (path, package)
            for package in self.packages
            for path in self._named_paths(subpackage, package)
        ]

    def _named_paths(self, subpackage: str, package: PartPackage) -> list[Path]:
        """Return the files whose names may be written in YAML: all but the one for other packages' models."""
        paths = package.paths(subpackage)
        if subpackage != "nn" or package != self.inside[0]:
            return paths
        return [path for path in paths if path.name != "external.py"]

    def _names(self, subpackage: str, package: PartPackage) -> dict[str, Path]:
        files = [
            (path, self._try(path, package)) for path in self._named_paths(subpackage, package)
        ]
        return {name: path for path, file in files if file for name in file.names}

    def _check_names(self, subpackage: str) -> None:
        """Raise PartError if a part from outside has a name that another part has already."""
        outside = [
            package for package in self.packages if package.outside and package.paths(subpackage)
        ]
        key = (subpackage, tuple(outside))
        if not outside or key in self.unique:
            return
        known = {
            name: path
            for package in self.inside
            for name, path in self._names(subpackage, package).items()
        }
        for package in outside:
            for name, path in self._names(subpackage, package).items():
                if name in known:
                    raise taken(subpackage, name, path, known[name])
                known[name] = path
        self.unique.add(key)

    def _try(self, path: Path, package: PartPackage, wanted: str = SETTINGS) -> PartSource | None:
        """Read a file that may not be meant: one from outside that is wrong stops nothing."""
        try:
            return self._read(path, package, wanted)
        except PartError:
            return None

    def _text(self, path: Path, package: PartPackage) -> str:
        try:
            return read_text(path, LARGEST_SOURCE_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            if not package.outside:
                raise
            reason = error.strerror if isinstance(error, OSError) else error
            raise PartError(f"{path}: cannot be read: {reason}") from error

    def _read(self, path: Path, package: PartPackage, wanted: str = SETTINGS) -> PartSource | None:
        try:
            changed = path.stat().st_mtime_ns
        except OSError:
            return None
        if path not in self.files or self.files[path][0] != changed:
            module_name = f"{package.module_name}.{path.parent.name}.{path.stem}"
            text = self._text(path, package)
            try:
                read = read_source(text, path, module_name, wanted)
            except Exception as error:
                if not package.outside:
                    raise
                words = (
                    " ".join(str(error).split())
                    .removeprefix(f"{path}: ")
                    .partition(f" ({path.name}")[0]
                )
                raise PartError(
                    f"{place(error, path)}: {explain_import(error) or words}"
                ) from error
            self.files[path] = (changed, read)
        return self.files[path][1]

    def _plugin(
        self, subpackage: str, name: str, path: Path, package: PartPackage, file: PartSource
    ) -> Plugin:
        return Plugin(
            subpackage=subpackage,
            name=name,
            path=path,
            package=package,
            description=file.description,
            settings_class=file.declared,
            defaults=file.names.get(name, {}),
            task=file.literals.get("TASK"),
            conflicts=file.literals.get("CONFLICTS", {}),
            literals=file.literals,
            notes=file.notes,
        )


def taken(subpackage: str, name: str, path: Path, other: Path | None = None) -> PartError:
    """Return the error that says of which two files a name is; without a second, it is of none."""
    kind = with_article(KINDS[subpackage])
    remedy = f", in {other}; rename one of them" if other else ", of mpt's own; rename the file"
    return PartError(f"{path}: there is {kind} named {name} already{remedy}")


def place(error: BaseException, path: Path) -> str:
    """Return `path:line` of the last statement of a file that an error came through, or the path alone."""
    # a source that is parsed without its name has none
    of_file = isinstance(error, SyntaxError) and error.filename in (str(path), "<unknown>")
    line = error.lineno if isinstance(error, SyntaxError) and of_file else None
    for frame, number in walk_tb(error.__traceback__):
        if frame.f_code.co_filename == str(path):
            line = number
    return f"{path}:{line}" if line else str(path)


INSTALLED = Registry(outside=outside_packages)
