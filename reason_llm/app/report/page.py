"""The report: one HTML file that loads nothing and shows untrusted text as text.

The data are JSON in a script element of another type, with HTML's characters escaped, and the
page's code makes text nodes of them. The content security policy allows only the page's own script
and style, by their hashes, and no connection."""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

import orjson

from reason_llm.app.report import raised
from reason_llm.app.report.payload import Examined, blobs, examine, to_value, without_paths
from reason_llm.app.report.runs import read_runs
from reason_llm.errors import without_secrets
from reason_llm.files import check_writable, read_text, write_atomically

SCRIPTS = ("elements.js", "charts.js", "rollouts.js", "group.js", "page.js", "setup.js")
HIDDEN = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
"""In JSON, what could end the script element or a line of it."""


def write_report(folders: list[Path], out: Path) -> list[str]:
    """Examine the runs and write their report; return a line on the alarms of each run."""
    runs = read_runs(folders)
    check_writable(out.parent)
    examined = [examine(run, 1 / len(runs)) for run in runs]
    write_atomically(out, page(examined))
    return [
        (f"{item.run.label}: " if len(runs) > 1 else "") + raised.summary(item.alarms, item.ended)
        for item in examined
    ]


def page(examined: Sequence[Examined]) -> bytes:
    """The file with all data in it."""
    data = orjson.dumps(to_value(examined)).decode().translate(HIDDEN)
    embedded = f'<script type="application/json" id="data">{data}</script>'
    for (run, step), blob in blobs(examined).items():
        text = base64.b64encode(blob).decode()
        embedded += f'\n<script type="text/plain" id="rollouts-{run}-{step}">{text}</script>'
    return _filled(examined, embedded, "'none'")


def live_page(examined: Sequence[Examined]) -> bytes:
    """The page without data; it asks its own server for them."""
    return _filled(examined, "", "'self'")


def _filled(examined: Sequence[Examined], data: str, connect: str) -> bytes:
    script = "\n".join(_asset(name) for name in SCRIPTS)
    style = _asset("page.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    runs = [item.run for item in examined]
    labels = " · ".join(run.label for run in runs)
    title = escape(without_secrets(without_paths(labels, runs)))
    # From the last place to the first, so that nothing that was filled in is searched again.
    text = _asset("page.html")
    for name, value in (("script", script), ("data", data), ("style", style), ("title", title),
                        ("policy", policy)):  # fmt: skip
        before, _, after = text.partition(f"{{{{{name}}}}}")
        text = before + value + after
    return text.encode()


def _asset(name: str) -> str:
    return read_text(Path(__file__).with_name(name))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
