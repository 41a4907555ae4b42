"""YAML as people write it: a key that is given twice is a mistake, and what cannot be read has one type of error."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """The safe loader, and no key twice. What a merge (`<<`) brings may be given again, as YAML means it."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here and not while dicts are built: by then merged entries stand among a mapping's own.
        node = super().compose_mapping_node(anchor)
        lines: dict[Hashable, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            value = self.construct_object(key)
            if value in lines:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice: in line {lines[value]} and here; delete one",
                    problem_mark=key.start_mark,
                )
            lines[value] = key.start_mark.line + 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # !!int x, !!bool x, !!timestamp x
            raise yaml.MarkedYAMLError(
                problem=f"{node.value!r} is no value of its type: {error}", problem_mark=node.start_mark
            ) from error


def in_words(error: Exception) -> str:
    """Why a file of YAML could not be read, on one line."""
    known = isinstance(error, OSError) and error.strerror
    return str(known or " ".join(str(error).split()))


def load(text: str, name: str) -> Any:
    """The one document of a text; `name` stands in messages.

    Raises:
        yaml.YAMLError: it is no YAML, holds a value that cannot be (the 45th of a month), or gives a key twice, which
            the specification (YAML 1.2.2, 3.2.1.1) forbids and `yaml.safe_load` lets pass. Says the line.
    """
    loader = _Loader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError(f"{name} is nested too deeply") from error
    finally:
        loader.dispose()
