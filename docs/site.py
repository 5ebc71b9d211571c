"""Hook of MkDocs (``mkdocs.yml``): a link out of ``docs/`` becomes the path as text, since a site
has the pages alone."""

import re

OUTSIDE = re.compile(r"\[([^\]\n]{1,200})\]\(\.\./[^)\n]{1,200}\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page without links to files outside ``docs/``."""
    return OUTSIDE.sub(r"\1", markdown)
