"""Turns the fields that a docstring names into a list, for the API reference; an extension of griffe (mkdocs.yml).

The docstrings describe parameters in lines such as `prompts: a text, ...`. Markdown would run these lines together.
"""

import re
from typing import Any

import griffe

FIELD = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)


class FieldLists(griffe.Extension):
    """Makes a list item of each line that begins with the name of a field."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"\n+(?=\w+(?:, \w+)*: )", "\n\n", obj.docstring.value)
            obj.docstring.value = FIELD.sub(r"- `\1`: ", text)
