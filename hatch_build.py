"""The README as a package index shows it: with absolute links, which the place of a release gives.

    RANKONE_SOURCE_URL=https://example.org/rankone/blob/v0.2.0 python -m build

In a clone links are relative, so that they work there. Without the variable they stay as they are.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "RANKONE_SOURCE_URL"


class Readme(MetadataHookInterface):
    """Sets `readme`, and where the place of the release is known, a link to it."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = os.environ.get(VARIABLE, "").rstrip("/")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, source)}
        if source:
            metadata["urls"] = {**metadata.get("urls", {}), "Source": source}


def absolute(text: str, source: str) -> str:
    """Relative links and images of a page as links into `source`; the page itself if that is empty."""
    if not source:
        return text
    raw = source.replace("/blob/", "/raw/")  # an image is wanted as it is, not on a page about it

    def link(match: re.Match) -> str:
        image, words, target = match.groups()
        return f"{image}[{words}]({raw if image else source}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#|/)([^)\s]+)\)", link, text)
