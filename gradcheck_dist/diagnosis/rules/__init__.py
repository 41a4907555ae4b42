"""The rules: one file each, found by lying in this folder.

A rule module has CODE, NAME and a docstring that is its page. It finds something in one of two ways, or in both:
`judge(case)` names a case of wrong weights, or returns None (the first rule that answers names it, in the order of
codes; GS000 answers always), and `audit(facts)` yields what leaves no pattern in the weights. `triggered(context)` and
`could_audit(facts)` say when finding nothing means that the rule passed; without them it never does.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType


@cache
def all_rules() -> tuple[ModuleType, ...]:
    """Every rule module, in the order of codes, GS000 last."""
    names = [found.name for found in pkgutil.iter_modules(__path__) if found.name.startswith("gs")]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return tuple(sorted(modules, key=lambda module: (module.CODE == "GS000", module.CODE)))


def find_rule(code_or_name: str) -> ModuleType | None:
    """The rule with this code or name, None when there is none."""
    wanted = code_or_name.lower()
    return next((rule for rule in all_rules() if wanted in (rule.CODE.lower(), rule.NAME)), None)
