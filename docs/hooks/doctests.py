"""Docstrings as Markdown wants them: it takes a bare `>>>` for a quotation, and `x [K]` after a bracket for a link.

Of the annotation of a setting only the type is shown: the rest of `Annotated[int, ...]` is for the command line.
What scripts of the gallery use names them as its last line.
"""

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from gallery import entries

_DOCTEST = re.compile(r"^( *)>>> .*\n?(?:^\1(?! *\n)\S.*\n?|^\1 +\S.*\n?)*", flags=re.MULTILINE)


def fenced(text: str) -> str:
    """Return the docstring with a fence around each doctest: from `>>>` to the next empty line.

    >>> fenced("Twice.\\n\\n>>> 2 * 2\\n4\\n\\nMore.").splitlines()
    ['Twice.', '', '```pycon', '>>> 2 * 2', '4', '```', '', 'More.']
    """

    def fence(found: re.Match) -> str:
        indent, code = found[1], found[0].rstrip("\n")
        return f"{indent}```pycon\n{code}\n{indent}```\n"

    return _DOCTEST.sub(fence, text)


class Doctests(griffe.Extension):
    """Fences the doctests of everything that is documented, before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """What lies in a package."""
        for one in (obj, *(getattr(obj, "parameters", None) or ())):
            annotation = getattr(one, "annotation", None)
            if isinstance(annotation, griffe.ExprSubscript) and annotation.canonical_path == "typing.Annotated":
                one.annotation = annotation.slice.elements[0]
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value.replace("] [", "] \\["))

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """The package itself, and the scripts at what they use of it."""
        self.on_object(obj=pkg)
        scripts = entries()
        for name in sorted(set().union(*(script.uses for script in scripts))):
            package, _, path = name.partition(".")
            one = _found(pkg, path) if package == pkg.name else None
            if one and not one.is_module:
                links = ", ".join(
                    f"[{script.title}][gallery-{script.name}]" for script in scripts if name in script.uses
                )
                one.docstring = one.docstring or griffe.Docstring("", parent=one)
                one.docstring.value += f"\n\nIn the gallery: {links}"  # in place: it knows how it is parsed


def _found(pkg: griffe.Module, path: str) -> griffe.Object | None:
    """Return what a package calls so, where it is defined: what it imports, before a file of the same name."""
    try:
        if path in pkg.imports and pkg[path].is_module:
            path = pkg.imports[path].removeprefix(f"{pkg.name}.")
        return pkg[path].final_target if pkg[path].is_alias else pkg[path]
    except (KeyError, griffe.AliasResolutionError):  # made by a program, or an attribute of a result
        return None
