"""Extension of griffe: a section `Example:` of a docstring is rendered as its `Examples:`, code beside what it prints."""

import re

from griffe import Extension


class Examples(Extension):
    """Rename the section; griffe would show the singular as a folded box of running text."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
