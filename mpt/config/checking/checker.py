"""The check of a configuration's tree, section by section, going on after a mistake.

Plugins are chosen by name first, then each section is checked against its plugin's settings with JSON's strictness: a
list may become a tuple, but text never becomes a number, and true is no 1.

Nothing here imports a plugin's module; a model of another package is only named, and only if it was granted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from mpt.config.checking.averages import moved_settings, with_average
from mpt.config.checking.elsewhere import models_of, parts_hint, undeclared_task, unknown_model
from mpt.config.checking.layers import SECTIONS
from mpt.config.checking.precision_names import ALIASES, meant_by, resolve_precision_name
from mpt.config.finding.registry import Plugin, Registry
from mpt.config.options import Options, options_within
from mpt.config.schema import (
    NAMED_SECTIONS,
    Choice,
    Config,
    GeneralOptions,
    Memory,
    MemoryOptions,
    Parallel,
    Precision,
    Train,
)
from mpt.config.text.messages import describe, explain_errors, unknown_key, unknown_name
from mpt.config.text.yaml_text import Node, Problem, printable

DEFAULT_NAMES = {"dataset": "digits", "precision": "amp", "optimizer": "adam"}
DEFAULT_STEPS = 1000
EXTERNAL_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_.]*):([A-Za-z_][A-Za-z0-9_.-]*)")
BUILT_IN_SOURCES = ("torchvision", "timm")

S = TypeVar("S", bound=Options)


class Checker:
    """Checks one tree, section by section, and continues after a mistake."""

    def __init__(self, root: Node, registry: Registry, allow: Sequence[str]) -> None:
        self.root = root
        self.sections = root.members
        self.registry = registry
        self.allow = allow
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        """Notes on settings that were written by their earlier names."""
        self.elsewhere: dict[str, str] = {}
        """Key -> its full path, for keys written in the wrong section."""

    def config(self) -> Config | None:
        """Return the configuration, or None with `problems` filled."""
        model = self.choose("model", "nn", None)
        task = self.choose_task(model)
        chosen = {"model": model, "task": task}
        for section in ("dataset", "optimizer"):
            chosen[section] = self.choose(section, NAMED_SECTIONS[section], DEFAULT_NAMES[section])
        self.sections, self.notes = moved_settings(self.sections, task, self.problems)
        mode, fixed = self.choose_precision()
        tricks = self.choose_tricks()
        self.remember(chosen, mode)

        found = {name: self.choice(name, plugin) for name, plugin in chosen.items() if plugin}
        choices = {name: choice for name, choice in found.items() if choice}
        precision = self.precision(mode, fixed) if mode else None
        memory = self.memory(tricks)
        train = self.train(task)
        parallel = self.settings(
            Parallel, self.section("parallel"), ("parallel",), list(Parallel.model_fields)
        )
        general = self.general()
        if self.problems or not (precision and memory and train and parallel and general):
            return None
        return Config(
            model=choices["model"],
            task=choices["task"],
            dataset=choices["dataset"],
            optimizer=choices["optimizer"],
            precision=precision,
            memory=memory,
            train=train,
            seed=general.seed,
            name=general.name,
            parallel=parallel,
            notes=tuple(self.notes),
        )

    def section(self, name: str) -> Node:
        """Return a section's mapping, empty if it is absent; a section that is no mapping is reported."""
        node = self.sections.get(name, Node({}, self.root.place))
        if isinstance(node.value, dict):
            return node
        if node.value is not None:
            is_trick = name == "memory" and node.value in self.registry.names("memory")
            hint = (
                f"; write memory.{node.value}=true, in a file memory: {{{node.value}: true}}"
                if is_trick
                else ""
            )
            self.report(node, (name,), f"found {describe(node)}; allowed: a mapping{hint}")
        return replace(node, value={})

    def report(self, node: Node, path: tuple[str, ...], text: str, at_key: bool = False) -> None:
        place = node.key_place if at_key and node.key_place else node.place
        self.problems.append(Problem(place, path, text))

    def remember(self, chosen: Mapping[str, Plugin | None], mode: Plugin | None) -> None:
        """Note the section of each key, for hints."""
        fields: dict[str, type[Options]] = {
            "train": Train,
            "memory": MemoryOptions,
            "parallel": Parallel,
        }
        fields |= {name: plugin.settings_class for name, plugin in chosen.items() if plugin}
        fields |= {"precision": mode.settings_class} if mode else {}
        for section, settings in fields.items():
            for key in settings.model_fields:
                self.elsewhere.setdefault(key, f"{section}.{key}")
        for trick in self.registry.names("memory"):
            self.elsewhere.setdefault(trick, f"memory.{trick}")
        for key in GeneralOptions.model_fields:
            self.elsewhere.setdefault(key, key)

    def written_name(
        self, section: str, key: str, default: str | None, required: bool = True
    ) -> tuple[str | None, Node]:
        """Return the name that a section chooses its plugin by, and the node to blame if it does not exist."""
        before = len(self.problems)
        node = self.section(section)
        if len(self.problems) > before:
            return None, node
        name = node.members.get(key)
        if name is None or (name.value is None and default):
            if default is None and required:
                subpackage = NAMED_SECTIONS.get(section, section)
                names = ", ".join(self.registry.names(subpackage)) or "(there are none)"
                hint = "" if self.sections else "; `mpt init` writes a configuration to start from"
                self.report(
                    node, (section, key), f"missing; allowed: one of {names}{hint}", at_key=True
                )
            return default, name or node
        if not isinstance(name.value, str):
            self.report(
                name,
                (section, key),
                f"found {describe(name)}; allowed: a name, in quotes if it looks like a number",
            )
            return None, name
        return name.value, name

    def choose(
        self, section: str, subpackage: str, default: str | None, required: bool = True
    ) -> Plugin | None:
        name, node = self.written_name(section, "name", default, required)
        if name is None:
            return None
        if subpackage == "nn" and ":" in name and not self.may_use(name, node):
            return None
        plugin = self.registry.find(subpackage, name)
        if plugin is None:
            self.registry.check(subpackage)  # it may be the name of a file that cannot be read
            known = self.registry.names(subpackage)
            folder = (
                f"name: image_folder and root: {name}"
                if subpackage == "data" and "/" in name
                else None
            )
            text = (
                unknown_model(name, known)
                if subpackage == "nn"
                else unknown_name(name, known, meant=folder)
            )
            hint = (
                "" if subpackage == "nn" or "did you mean" in text else parts_hint(subpackage, name)
            )
            self.report(node, (section, "name"), text + hint)
        return plugin

    def choose_task(self, model: Plugin | None) -> Plugin | None:
        """Choose the written task, or else the model's own. One that no model names as its own may train any."""
        lacks = undeclared_task(model, self.registry) if model else None
        own = model.task if model and not lacks else None
        before = len(self.problems)
        task = self.choose("task", "tasks", own, required=model is not None and not lacks)
        is_absent = task is None and len(self.problems) == before
        trained = models_of(task, self.registry) if task and model and task.name != own else []
        if model and lacks and (trained or is_absent):
            self.report(self.written_name("model", "name", None)[1], ("model", "name"), lacks)
        elif model and task and trained:
            text = (
                f"{task.name} does not train {model.name}, whose task is {own}; leave task.name out, or set "
                f"model.name to one of {', '.join(trained)}"
            )
            self.report(self.written_name("task", "name", own)[1], ("task", "name"), text)
        return task

    def may_use(self, name: str, node: Node) -> bool:
        """Is this model of another package well named, and its package built in or granted?"""
        match = EXTERNAL_NAME.fullmatch(name)
        if not match or len(name) > 200:
            form = "torchvision:NAME, timm:NAME or package.module:Name"
            self.report(
                node,
                ("model", "name"),
                f"found '{printable(name)}'; allowed for a model of another package: {form}",
            )
            return False
        module = match[1]
        if module in BUILT_IN_SOURCES or any(
            module == granted or module.startswith(granted + ".") for granted in self.allow
        ):
            return True
        package = module.split(".")[0]
        remedy = f"if you trust it, add --allow {package} to the command"
        self.report(
            node,
            ("model", "name"),
            f"'{name}' would run code of the package {package}, which is not granted; {remedy}",
        )
        return False

    def choose_precision(self) -> tuple[Plugin | None, Mapping[str, str]]:
        written, node = self.written_name("precision", "mode", DEFAULT_NAMES["precision"])
        if written is None:
            return None, {}
        known = self.registry.names("precision")
        name, fixed = resolve_precision_name(written, known)
        plugin = self.registry.find("precision", name)
        if plugin is None:
            self.report(
                node,
                ("precision", "mode"),
                unknown_name(written, [*known, *ALIASES], meant=meant_by(written)),
            )
        return plugin, fixed

    def choose_tricks(self) -> dict[str, Plugin]:
        """Return the tricks that are on; unknown ones and conflicts are reported.

        `null` is off like `false`. A key with nothing behind it is neither: `memory` refuses it.
        """
        written = self.section("memory").members
        chosen: dict[str, Plugin] = {}
        for name, child in written.items():
            if name in MemoryOptions.model_fields:
                continue
            plugin = self.registry.find("memory", name)
            if plugin is None:
                keys = [*MemoryOptions.model_fields, *self.registry.names("memory")]
                self.report(child, ("memory", name), unknown_key(name, keys, {}), at_key=True)
            elif child.value is not False and (child.value is not None or child.is_blank):
                chosen[name] = plugin
        for name, plugin in chosen.items():
            for other, reason in plugin.conflicts.items():
                if other in chosen:
                    self.report(
                        written[name],
                        ("memory", name),
                        f"cannot be combined with {other}: {reason}",
                        at_key=True,
                    )
        return chosen

    def choice(self, section: str, plugin: Plugin) -> Choice | None:
        keys = ["name", *plugin.settings_class.model_fields]
        node = _without(self.section(section), "name")
        settings = self.settings(plugin.settings_class, node, (section,), keys, plugin.defaults)
        phases = node.members.get("phases") if section == "optimizer" else None
        for name, child in phases.members.items() if phases and phases.is_mapping else ():
            if child.is_mapping:
                common = settings.model_dump(mode="json") if settings else plugin.defaults
                path = (section, "phases", name)
                self.settings(plugin.settings_class, child, path, keys[1:], common)
        return Choice(plugin.name, settings, plugin) if settings else None

    def precision(self, plugin: Plugin, fixed: Mapping[str, str]) -> Precision | None:
        section = self.section("precision")
        node = _without(section, "mode")
        for key, value in fixed.items():
            given = node.members.get(key)
            if given and given.value not in (value, "auto"):
                alias = section.members["mode"].value
                self.report(
                    given,
                    ("precision", key),
                    f"found {describe(given)}, but the mode {alias} means {key} {value}",
                )
            node = replace(node, value={**node.members, key: Node(value, (given or section).place)})
        keys = ["mode", *plugin.settings_class.model_fields]
        settings = self.settings(plugin.settings_class, node, ("precision",), keys, plugin.defaults)
        return Precision(plugin.name, settings, plugin) if settings else None

    def memory(self, plugins: Mapping[str, Plugin]) -> Memory | None:
        node = self.section("memory")
        own = {
            key: child for key, child in node.members.items() if key in MemoryOptions.model_fields
        }
        general = self.settings(
            MemoryOptions, replace(node, value=own), ("memory",), list(MemoryOptions.model_fields)
        )
        tricks: dict[str, Options] = {}
        for name, plugin in plugins.items():
            child = node.members[name]
            if not isinstance(child.value, dict):
                keys = ", ".join(plugin.settings_class.model_fields) or "none"
                allowed = f"true, false or a mapping with its keys ({keys})"
                found = "nothing" if child.is_blank else describe(child)
                self.report(child, ("memory", name), f"found {found}; allowed: {allowed}")
                continue
            keys_allowed = list(plugin.settings_class.model_fields)
            settings = self.settings(
                plugin.settings_class, child, ("memory", name), keys_allowed, plugin.defaults
            )
            if settings:
                tricks[name] = settings
        return Memory(general.on_oom, tricks, dict(plugins), general.ceiling) if general else None

    def train(self, task: Plugin | None) -> Train | None:
        """Check the section of that name; a run without a length takes `DEFAULT_STEPS`."""
        node = with_average(self.section("train"), task)
        written = node.members
        lengths = [
            key for key in ("steps", "epochs") if key in written and written[key].value is not None
        ]
        said_later = [key for key in lengths if written[key].place.line is None]
        # an override of one length replaces the file's other one
        if len(lengths) == 2 and len(said_later) == 1:
            kept = {
                key: one for key, one in written.items() if key in said_later or key not in lengths
            }
            node = replace(node, value=kept)
        elif len(lengths) == 2:
            text = "steps and epochs are both given; keep one of them and set the other to null"
            self.report(written["epochs"], ("train", "epochs"), text, at_key=True)
        settings = self.settings(Train, node, ("train",), list(Train.model_fields))
        if settings is None or lengths:
            return settings
        return settings.model_copy(update={"steps": DEFAULT_STEPS})

    def general(self) -> GeneralOptions | None:
        rest = {key: node for key, node in self.sections.items() if key not in SECTIONS}
        keys = [*SECTIONS, *GeneralOptions.model_fields]
        return self.settings(GeneralOptions, replace(self.root, value=rest), (), keys)

    def settings(
        self,
        settings_class: type[S],
        node: Node,
        path: tuple[str, ...],
        keys: Sequence[str],
        defaults: Mapping[str, Any] | None = None,
    ) -> S | None:
        """Check one mapping against a class of settings."""
        plain = node.plain()
        assert isinstance(plain, dict)
        try:
            return settings_class.model_validate_json(
                json.dumps({**(defaults or {}), **plain}), strict=True
            )
        except ValidationError as error:
            inner = {
                name: list(options.model_fields)
                for name, own in settings_class.model_fields.items()
                if (options := options_within(own.annotation))
            }
            problems = explain_errors(
                error.errors(include_url=False), node, path, keys, self.elsewhere, inner
            )
            self.problems += problems
            self.hint_at_replacing(path, problems)
            return None

    def hint_at_replacing(self, path: tuple[str, ...], problems: Sequence[Problem]) -> None:
        """Say how to leave out the file's settings if an override chose another plugin, which does not know them."""
        section = path[0] if path else ""
        name = self.section(section).members.get("name") if section in NAMED_SECTIONS else None
        stale = any(
            "unknown key" in problem.text and problem.place.line is not None for problem in problems
        )
        if name is not None and name.place.line is None and stale:
            wanted = f"{section}=null {section}={name.value}"
            self.report(
                name,
                (section, "name"),
                f"to leave out what the file says of another {section}, write {wanted}",
            )


def _without(node: Node, key: str) -> Node:
    return replace(node, value={name: child for name, child in node.members.items() if name != key})
