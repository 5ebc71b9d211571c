"""Images of a prompt on the report's page, in Debian's Chromium."""

import hashlib
from dataclasses import replace
from pathlib import Path

from PIL import Image

from chromium import IN_A_BROWSER, Chromium, opened, text_of
from reason_llm.rollout import ATTACHMENTS
from report_runs import group, record, write_run

pytestmark = IN_A_BROWSER


def test_the_images_of_a_prompt_are_shown(page: Chromium, tmp_path: Path) -> None:
    """The page's policy lets the thumbnail load; one that a row holds is named."""
    file = tmp_path / "<b>seven.png"
    Image.new("RGB", (300, 200), (10, 200, 90)).save(file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    records = [
        {"kind": "images", "sha256": digest, "start": start, "length": 1,
         "about": {"path": path, "grid": [1, 2, 2]}}
        for start, path in enumerate((str(file), ""))
    ]  # fmt: skip
    asked = group(["7"], [1.0])
    asked = replace(asked, prompt=replace(asked.prompt, extra={ATTACHMENTS: records}))
    folder = write_run(tmp_path / "run", [record(0), record(1)], [[asked]])
    opened(page, folder, "view=rollouts")
    page.wait("document.querySelector('.detail .images img')?.naturalWidth")
    shown = "(({naturalWidth, naturalHeight, alt}) => [naturalWidth, naturalHeight, alt])"
    image = page.run(f"{shown}(document.querySelector('.detail .images img'))")
    assert image == [96, 64, "<b>seven.png"]
    assert text_of(page, ".images .tag") == f"image {digest[:12]}, which its row holds"
    assert page.complaints == []
