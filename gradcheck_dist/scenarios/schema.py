"""Scenario files: from YAML to frozen objects, each mistake named with its file, field, value and legal values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, NoReturn

from gradcheck_dist.axes import MESH_AXES
from gradcheck_dist.errors import GradcheckError, nearest, unknown_value
from gradcheck_dist.scenarios.formula import Formula

SIZES = ("nproc", "accum", "microbatches", "steps", "seed")
"""Integers that a file sets under `defaults` and a command line may override."""
_CODE = re.compile(r"GS\d{3}")


@dataclass(frozen=True)
class ExpectedCulprit:
    """The event that must be blamed: its kind, the end of its file's path, and a part of its source line."""

    kind: str
    file: str
    line: str


@dataclass(frozen=True)
class Expectation:
    """What must be found in a faulty variant: one finding and the ratio observed / expected of every weight."""

    code: str
    name: str
    ratio: Formula
    culprit: ExpectedCulprit


@dataclass(frozen=True)
class Variant:
    """One training job of a scenario. `expect` is None where nothing may be found."""

    name: str
    story: str
    faults: tuple[str, ...]
    config: Mapping[str, Any]
    expect: Expectation | None


@dataclass(frozen=True)
class Scenario:
    """A known bug: story, where it was reported, the job that shows it, and its variants with the healthy twins.

    `mesh` gives each axis a degree, or the word "nproc" for the one axis that takes all remaining ranks.
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


def library() -> list[str]:
    """The names of all scenarios, sorted."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))


def load(name: str) -> Scenario:
    """A scenario of the library.

    Raises:
        GradcheckError: E601 no scenario of this name (the nearest names are given), E603 its file is faulty.
    """
    if name not in library():
        hint = "`gradcheck scenario --list` tells what each one shows."
        raise unknown_value("scenario", name, library(), code="E601", hint=hint)
    return parse(_folder().joinpath(f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml")


def _folder() -> Traversable:
    return resources.files(__package__) / "library"


def parse(text: str, file: str) -> Scenario:
    """A scenario out of a file's text; `file` stands in messages, and its stem must be the scenario's name.

    Raises:
        GradcheckError: E603 a field is missing, unknown or illegal.
    """
    import yaml

    try:
        document = yaml.safe_load(text)
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
    )
    top.done()
    top.check("name", scenario.name, scenario.name == file.rpartition("/")[2].removesuffix(".yaml"), "the file's name")
    expectations = [variant.expect is None for variant in scenario.variants]
    top.check("variants", names, any(expectations) and not all(expectations), "a faulty variant and a healthy twin")
    return scenario


def _mesh(top: _Fields) -> dict[str, int | str]:
    mesh = top.mapping("mesh")
    for axis, degree in mesh.items():
        top.check(f"mesh.{axis}", axis, axis in MESH_AXES, f"one of the axes {', '.join(MESH_AXES)}")
        top.check(f"mesh.{axis}", degree, degree == "nproc" or _positive(degree), "an integer from 1 up, or nproc")
    growing = [axis for axis, degree in mesh.items() if degree == "nproc"]
    top.check("mesh", mesh, len(growing) == 1, "exactly one axis with the degree nproc")
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
    expected = fields.raw("expect")
    expect = None if expected == "clean" else _expectation(fields.fields("expect"))
    fields.check(
        "expect", expected, bool(faults) == (expect is not None), "a finding where there are faults, else clean"
    )
    variant = Variant(name, fields.text("story"), faults, fields.mapping("config", {}), expect)
    fields.done()
    return variant


def _expectation(fields: _Fields) -> Expectation:
    code = fields.text("code")
    fields.check("code", code, bool(_CODE.fullmatch(code)), "a rule's code such as GS101")
    culprit = fields.fields("culprit")
    blamed = ExpectedCulprit(culprit.text("kind"), culprit.text("file"), culprit.text("line"))
    culprit.done()
    expectation = Expectation(code, fields.text("name"), Formula(str(fields.raw("ratio"))), blamed)
    fields.done()
    return expectation


def _any_of(values: Iterable[str]) -> str:
    return "one of " + ", ".join(values)
