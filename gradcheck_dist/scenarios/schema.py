"""Scenario files: from YAML to frozen objects, each mistake named with its file, field, value and legal values."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn

from gradcheck_dist.axes import AXIS_NAMES
from gradcheck_dist.errors import GradcheckError, nearest, unknown_value
from gradcheck_dist.scenarios.formula import Formula

SIZES = ("nproc", "accum", "microbatches", "steps", "seed")
"""Integers that a file sets under `defaults` and a command line may override."""
CLEAN = "clean"
"""Nothing is wrong, and nothing may be found."""
GRADIENTS_RIGHT = "gradients-right"
"""Something is wrong, but no gradient is, so nothing may be found."""
RIGHT = "1"
"""The ratio of weights that are right, for findings that no weight shows."""
_CODE = re.compile(r"GS\d{3}")
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_LEGAL_EXPECT = (
    f"a finding or a list of findings where there are faults, {GRADIENTS_RIGHT} where they are harmless, else clean"
)


@dataclass(frozen=True)
class ExpectedCulprit:
    """The event that must be blamed: its kind, the end of its file's path, and a part of its source line."""

    kind: str
    file: str
    line: str


@dataclass(frozen=True)
class Expectation:
    """A finding that must come out of a faulty variant.

    Attributes:
        ratio: observed / expected of every weight that it concerns; those of several findings multiply. Without one
            the weights are right, and something else is wrong.
        parameters: patterns of parameter names (`layers.0.*`); all others have the ratio 1. Without any, all are meant.
        factor: what the engine has to call the factor; None leaves the name free.
        terms: auxiliary loss terms; the ratio is then theirs, and the main loss's weights are right.
        from_step: the first step that it is found in; those before it are right.
    """

    code: str
    name: str
    ratio: Formula
    culprit: ExpectedCulprit
    parameters: tuple[str, ...] = ()
    factor: str | None = None
    terms: tuple[str, ...] = ()
    from_step: int = 0

    def concerns(self, parameter: str) -> bool:
        return not self.parameters or any(fnmatch.fnmatchcase(parameter, pattern) for pattern in self.parameters)


@dataclass(frozen=True)
class Variant:
    """One training job of a scenario. `expect` is empty where nothing may be found."""

    name: str
    story: str
    faults: tuple[str, ...]
    config: Mapping[str, Any]
    expect: tuple[Expectation, ...]


@dataclass(frozen=True)
class Scenario:
    """A known bug: story, where it was reported, the job that shows it, and its variants with the healthy twins.

    `mesh` gives each axis a degree, or the word "nproc" for the one axis that takes all remaining ranks. `torch` holds
    the versions that a bug of torch's own was seen on; elsewhere it need not show. `verify`: every backward is checked
    by central differences, as `gradcheck run --verify` does. `fixed_sizes`: defaults that no command line may replace,
    for with others this is another bug, or none.
    """

    name: str
    title: str
    story: str
    citations: tuple[str, ...]
    objective: str
    mesh: Mapping[str, int | str]
    defaults: Mapping[str, int]
    config: Mapping[str, Any]
    variants: tuple[Variant, ...]
    torch: tuple[str, ...] = ()
    verify: bool = False
    fixed_sizes: tuple[str, ...] = ()

    def seen_on(self, version: str) -> bool:
        """Whether the bug must show on this version of torch."""
        return not self.torch or any(version == one or version.startswith(f"{one}.") for one in self.torch)


class _Fields:
    """A mapping of a scenario file that is read field by field; `done` refuses what nobody asked for."""

    def __init__(self, file: str, path: str, value: object) -> None:
        self._file, self._path, self._asked = file, path, set[str]()
        if not isinstance(value, dict):
            self._refuse("", value, "a mapping")
        self._values: dict[str, Any] = {str(key): entry for key, entry in value.items()}

    def _refuse(self, name: str, value: object, legal: str) -> NoReturn:
        place = ".".join(part for part in (self._path, name) if part) or "the document"
        raise GradcheckError(f"{self._file}: {place} is {value!r}; legal is {legal}.", code="E603")

    def _get(self, name: str, kind: type, default: Any, legal: str) -> Any:
        self._asked.add(name)
        value = self._values.get(name, default)
        if value is None or not isinstance(value, kind) or isinstance(value, bool):
            self._refuse(name, value, legal)
        return value

    def text(self, name: str) -> str:
        value: str = self._get(name, str, None, "a text")
        return " ".join(value.split()) or self._refuse(name, value, "a text that is not empty")

    def texts(self, name: str, default: list[str] | None = None) -> tuple[str, ...]:
        value = self._get(name, list, default, "a list of texts")
        if not all(isinstance(entry, str) for entry in value):
            self._refuse(name, value, "a list of texts")
        return tuple(value)

    def mapping(self, name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
        value: dict[str, Any] = self._get(name, dict, default, "a mapping")
        return value

    def fields(self, name: str) -> _Fields:
        return _Fields(self._file, f"{self._path}.{name}".lstrip("."), self.mapping(name))

    def entry(self, name: str, index: int) -> _Fields:
        """One mapping out of a list."""
        return _Fields(self._file, f"{self._path}.{name}[{index}]".lstrip("."), self.raw(name)[index])

    def flag(self, name: str) -> bool:
        """Whether a thing is asked for; left out is no."""
        value = self.raw(name)
        self.check(name, value, value is None or isinstance(value, bool), "true or false")
        return bool(value)

    def text_or_none(self, name: str) -> str | None:
        self._asked.add(name)
        return self.text(name) if self._values.get(name) is not None else None

    def text_or_texts(self, name: str) -> tuple[str, ...]:
        """One text, or a list of them; nothing where the field is missing."""
        return (self.text(name),) if isinstance(self._values.get(name), str) else self.texts(name, [])

    def raw(self, name: str) -> Any:
        self._asked.add(name)
        return self._values.get(name)

    def check(self, name: str, value: object, is_legal: bool, legal: str) -> None:
        if not is_legal:
            self._refuse(name, value, legal)

    def done(self) -> None:
        for name in self._values.keys() - self._asked:
            close = nearest(name, self._asked)
            hint = f" Did you mean {close[0]}?" if close else ""
            place = f"{self._path}.{name}".lstrip(".")
            raise GradcheckError(
                f"{self._file}: unknown field {place}.{hint} Legal fields: {', '.join(sorted(self._asked))}.",
                code="E603",
            )


def library(folder: Path | None = None) -> list[str]:
    """The names of all scenarios of a folder, by default of the ones that come with the package, sorted.

    Raises:
        GradcheckError: E606 there is no such folder, or no scenario in it.
    """
    names = sorted(
        entry.name.removesuffix(".yaml") for entry in _folder(folder).iterdir() if entry.name.endswith(".yaml")
    )
    if not names:
        raise GradcheckError(
            f"the library {folder} holds no scenario (*.yaml). `gradcheck scenario --new NAME --library {folder}` "
            "writes one.",
            code="E606",
        )
    return names


def load(name: str, folder: Path | None = None) -> Scenario:
    """A scenario of a folder, by default of the package's own.

    Raises:
        GradcheckError: E601 no scenario of this name (the nearest names are given), E603 its file is faulty, E606
            there is no such folder, or no scenario in it.
    """
    names = library(folder)
    if name not in names:
        hint = "`gradcheck scenario --list` tells what each one shows."
        raise unknown_value("scenario", name, names, code="E601", hint=hint)
    place = _folder(folder).joinpath(f"{name}.yaml")
    file = f"{name}.yaml" if folder is None else str(place)
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GradcheckError(
            f"cannot read {file}: {error}. A scenario is UTF-8 text; `gradcheck scenario --new NAME` writes one.",
            code="E603",
        ) from error
    return parse(text, file)


def _folder(folder: Path | None) -> Traversable:
    if folder is None:
        return resources.files(__package__) / "library"
    if not folder.is_dir():
        raise GradcheckError(
            f"the library {folder} is no folder. Name a folder of scenario files (*.yaml); `gradcheck scenario --new "
            "NAME --library DIR` makes one.",
            code="E606",
        )
    return folder


def check_name(name: str) -> None:
    """Raise GradcheckError (E607) unless `name` can be a scenario's, and its file's, name."""
    if not _NAME.fullmatch(name):
        raise GradcheckError(
            f"the name {name!r} is unusable; legal are small letters, digits and hyphens, such as my-loss-scale.",
            code="E607",
        )


def parse(text: str, file: str) -> Scenario:
    """A scenario out of a file's text; `file` stands in messages, and its stem must be the scenario's name.

    Raises:
        GradcheckError: E603 a field is missing, unknown or illegal.
    """
    import yaml

    from gradcheck_dist.yaml_text import load as load_yaml

    try:
        document = load_yaml(text, file)
    except yaml.YAMLError as error:
        raise GradcheckError(f"{file} is not YAML: {error}", code="E603") from error
    top = _Fields(file, "", document)
    variants = top.fields("variants")
    names = [str(name) for name in top.mapping("variants")]
    scenario = Scenario(
        name=top.text("name"),
        title=top.text("title"),
        story=top.text("story"),
        citations=top.texts("citations"),
        objective=top.text("objective"),
        mesh=_mesh(top),
        defaults=_defaults(top),
        config=top.mapping("config", {}),
        variants=tuple(_variant(name, variants.fields(name)) for name in names),
        torch=top.texts("torch", []),
        verify=top.flag("verify"),
        fixed_sizes=top.texts("fixed_sizes", []),
    )
    top.done()
    for size in scenario.fixed_sizes:
        top.check("fixed_sizes", size, size in scenario.defaults, f"one of {', '.join(scenario.defaults)}")
    top.check("name", scenario.name, scenario.name == file.rpartition("/")[2].removesuffix(".yaml"), "the file's name")
    for name in names:
        top.check("variants", name, bool(_NAME.fullmatch(name)), "a name of small letters, digits and hyphens")
    healthy = [not variant.expect and not variant.faults for variant in scenario.variants]
    top.check("variants", names, any(healthy) and not all(healthy), "a faulty variant and a healthy twin")
    return scenario


def _mesh(top: _Fields) -> dict[str, int | str]:
    mesh = top.mapping("mesh")
    for axis, degree in mesh.items():
        top.check(f"mesh.{axis}", axis, axis in AXIS_NAMES, f"one of the axes {', '.join(AXIS_NAMES)}")
        top.check(f"mesh.{axis}", degree, degree == "nproc" or _positive(degree), "an integer from 1 up, or nproc")
    growing = [axis for axis, degree in mesh.items() if degree == "nproc"]
    legal = "exactly one axis with the degree nproc, and not ep, which borrows its ranks from dp_shard * cp"
    top.check("mesh", mesh, len(growing) == 1 and growing != ["ep"], legal)
    return dict(mesh)


def _defaults(top: _Fields) -> dict[str, int]:
    defaults = {"accum": 1, "microbatches": 1, "steps": 1, "seed": 0} | top.mapping("defaults")
    for size, value in defaults.items():
        top.check(f"defaults.{size}", size, size in SIZES, f"one of {', '.join(SIZES)}")
        top.check(f"defaults.{size}", value, type(value) is int and value >= (size != "seed"), "an integer from 1 up")
    top.check("defaults.nproc", None, "nproc" in defaults, "an integer from 1 up")
    return defaults


def _positive(value: object) -> bool:
    return type(value) is int and value > 0


def _variant(name: str, fields: _Fields) -> Variant:
    from gradcheck_dist.trainer.faults import fault_names

    faults = fields.texts("faults", [])
    for fault in faults:
        fields.check("faults", fault, fault in fault_names(), _any_of(fault_names()))
    variant = Variant(name, fields.text("story"), faults, fields.mapping("config", {}), _expectations(fields))
    expected = fields.raw("expect")
    off = bool(faults) or bool(variant.config and variant.expect)
    fields.check("expect", expected, off == (expected != CLEAN), _LEGAL_EXPECT)
    fields.done()
    return variant


def _expectations(fields: _Fields) -> tuple[Expectation, ...]:
    expected = fields.raw("expect")
    if expected in (CLEAN, GRADIENTS_RIGHT):
        return ()
    if isinstance(expected, dict):
        return (_expectation(fields.fields("expect")),)
    fields.check("expect", expected, isinstance(expected, list) and len(expected) > 0, _LEGAL_EXPECT)
    return tuple(_expectation(fields.entry("expect", index)) for index in range(len(expected)))


def _expectation(fields: _Fields) -> Expectation:
    code = fields.text("code")
    fields.check("code", code, bool(_CODE.fullmatch(code)), "a rule's code such as GS101")
    culprit = fields.fields("culprit")
    blamed = ExpectedCulprit(culprit.text("kind"), culprit.text("file"), culprit.text("line"))
    culprit.done()
    from_step = 0 if (first := fields.raw("from_step")) is None else first
    fields.check("from_step", from_step, type(from_step) is int and from_step >= 0, "an integer from 0 up")
    expectation = Expectation(
        code,
        fields.text("name"),
        Formula(RIGHT if (ratio := fields.raw("ratio")) is None else str(ratio)),
        blamed,
        fields.text_or_texts("parameters"),
        fields.text_or_none("factor"),
        fields.text_or_texts("terms"),
        from_step,
    )
    fields.done()
    return expectation


def _any_of(values: Iterable[str]) -> str:
    return "one of " + ", ".join(values)
