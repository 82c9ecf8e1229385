"""Docstrings as Markdown wants them: it takes a bare `>>>` for a quotation, and `x [K]` after a bracket for a link.

Of the annotation of a setting only the type is shown: the rest of `Annotated[int, ...]` is for the command line.
"""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^( *)>>> .*\n?(?:^\1(?! *\n)\S.*\n?|^\1 +\S.*\n?)*", flags=re.MULTILINE)


def fenced(text: str) -> str:
    """The docstring with a fence around each doctest: from `>>>` to the next empty line.

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
        """The package itself."""
        self.on_object(obj=pkg)
