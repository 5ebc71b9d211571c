"""Images in the cells of a row: a path, bytes, an object of Pillow, the Hub's ``{"bytes", "path"}``
or a data URL. Every function raises DataError.

Files are others': their bytes, their pixels and their formats are bounded.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image as Pillow, ImageOps, UnidentifiedImageError

from reason_llm.data import (
    IMAGE_COLUMNS,
    IMAGES,
    MARK,
    Completed,
    Example,
    Messages,
    Problem,
    Row,
    is_empty,
    is_image,
    shown,
    with_parts,
)
from reason_llm.errors import DataError, one_line
from reason_llm.files import MIB, read_bounded
from reason_llm.rollout import (
    KNOWN_FIELDS_ONLY,
    ROW,
    Attachment,
    Count,
    Text,
    record_from_json,
)

MAX_BYTES = 64 * MIB
MAX_PIXELS = 64 << 20
MAX_IMAGES = 64
"""Images of one row."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
THUMBNAIL_SIDE = 96
"""Pixels of the longer side of an image in a report."""
TAG = "<image>"
"""Place of an image in the texts of LLaMA-Factory, ms-swift and verl."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a prompt. Its pixels are in no record."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY
    sha256: Text
    """Digest of its file's bytes."""
    path: Text
    """Empty where the row itself holds the image."""
    grid: tuple[Count, Count, Count]
    """Patches over time, height and width."""
    start: Count
    """The first of its tokens in the prompt."""
    length: Count
    """Number of its tokens."""

    @property
    def record(self) -> Attachment:
        """The image as prompts and rows carry it."""
        about = {"path": self.path, "grid": [*self.grid]}
        return Attachment(IMAGES, self.sha256, self.start, self.length, about)


def image_of(record: Attachment) -> Image:
    """The image of a prompt's or a row's record. Raises DataError: it is none."""
    own = {"sha256": record.sha256, "start": record.start, "length": record.length}
    try:
        return record_from_json(Image, {**record.about, **own})
    except ValueError as error:
        raise DataError(f"a rollout's record of an image is damaged ({one_line(error)})") from error


@dataclass(frozen=True, slots=True)
class Picture:
    """The bytes of an image, or where they are."""

    sha256: str
    """Digest of the file's bytes."""
    path: str
    """Empty where the row itself holds the image."""
    size: tuple[int, int]
    """Width and height in pixels, upright."""
    held: bytes = b""
    """The bytes, where there is no path."""

    @property
    def part(self) -> str:
        """See ``data.attachments``."""
        return "image"

    def pixels(self) -> Pillow.Image:
        """The image, upright and in RGB. Raises DataError: its file was changed."""
        content = self.held or _read(self.path, Path(self.path))
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise DataError(f"{self.path} was changed since the data was read; restore it")
        return decoded(self.path, content)


def thumbnail(record: Attachment) -> tuple[str, str]:
    """The name of an image, and a data URL of it in at most 96 x 96 pixels; an empty one where its
    file is gone or was changed, and where the row itself held it."""
    return _thumbnail(image_of(record))


@lru_cache(maxsize=4096)
def _thumbnail(image: Image) -> tuple[str, str]:
    name = Path(image.path).name or f"image {image.sha256[:12]}, which its row holds"
    if not image.path:
        return name, ""
    try:
        pixels = Picture(image.sha256, image.path, (0, 0)).pixels()
    except DataError:
        return f"{name}, which is gone or was changed", ""
    buffer = BytesIO()
    pixels.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    pixels.save(buffer, "WEBP", quality=70)
    return name, "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def pictures_of(
    where: str, row: Row, source: str, ignored: Sequence[str]
) -> tuple[Row, list[Picture]]:
    """The row without its images, with ``MARK`` for each part of a message that is one, and
    the images in this order.

    Args:
        source: the row's file, to whose folder a path may be relative.
        ignored: columns that are not read.
    """
    left_out = {name.casefold() for name in ignored}
    names = [n for n in row if n.casefold() in IMAGE_COLUMNS and not is_empty(row[n])]
    names = [name for name in names if name.casefold() not in left_out]
    if len(names) > 1:
        raise DataError(
            f"{where}: the columns {', '.join(names)} all hold images; list those that are not to "
            "be read in data.columns.ignore"
        )
    cells = [cell for n in names for cell in (row[n] if isinstance(row[n], list) else [row[n]])]
    inline: list[Any] = []
    rest = {name: _marked(value, inline) for name, value in row.items() if name not in names}
    own = [cell for cell in inline if cell is not None]
    if own and cells:
        raise DataError(
            f"{where}: has images in its messages and in column {names[0]!r}; keep one of the two"
        )
    cells = own or cells
    # Counted before any image is read.
    if len(cells) > MAX_IMAGES:
        raise DataError(f"{where}: has {len(cells)} images; at most {MAX_IMAGES} are supported")
    if inline and len(inline) != len(cells):
        raise DataError(
            f"{where}: has {len(cells)} images for {len(inline)} parts of type image; make them "
            "the same number"
        )
    return rest, [read_picture(where, cell, Path(source).parent) for cell in cells]


def placed(example: Example, pictures: Sequence[Picture]) -> Example:
    """The example with an ``MARK`` for each image: where a part of a message is one, or where
    a user's message has ``<image>``; else before the text of the user's first message."""
    if not isinstance(example, Problem | Completed):
        raise DataError(f"{example.where}: has images, which the stage pretrain does not read")
    completions = example.completions if isinstance(example, Completed) else ()
    if any(MARK in message["content"] for turns in completions for message in turns):
        raise DataError(
            f"{example.where}: has an image after the assistant's first message, which is not "
            "supported; give the images in the prompt"
        )
    messages, count = [dict(message) for message in example.messages], len(pictures)
    asked = [message for message in messages if message["role"] == "user"]
    # As many tags as images are their places; any other number of tags is the user's text.
    if not any(MARK in message["content"] for message in messages):
        tags = sum(message["content"].count(TAG) for message in asked)
        for message in asked if tags == count else ():
            message["content"] = message["content"].replace(TAG, MARK)
        if tags != count:
            asked[0]["content"] = MARK * count + asked[0]["content"]
    marks = sum(message["content"].count(MARK) for message in messages)
    if marks != count:
        raise DataError(
            f"{example.where}: has {marks} places of images, U+FFFC among them, for {count} "
            "images; remove that character from the text"
        )
    waiting = iter(pictures)
    for message in messages:
        if marks := message["content"].count(MARK):
            message["attachments"] = [*islice(waiting, marks)]
    if isinstance(example, Problem) and isinstance(example.extra.get(ROW), dict):
        example = replace(example, extra={**example.extra, ROW: _in_parts(example, messages)})
    return replace(example, messages=messages)


def _in_parts(example: Problem, messages: Messages) -> Row:
    """The row as rewards of TRL's form get it, its messages with parts of type image."""
    row: Row = example.extra[ROW]
    asked = row["prompt"]
    if not isinstance(asked, list):
        return row
    added = asked[: len(asked) - len(messages)]  # data.system_prompt
    return {**row, "prompt": with_parts([*added, *messages])}


def _marked(value: Any, cells: list[Any]) -> Any:
    """The messages in a cell, with ``MARK`` for each part that is an image; append the image's
    value, or None, to ``cells``."""
    if isinstance(value, list):
        return [_marked(item, cells) for item in value]
    if not isinstance(value, dict) or not isinstance(value.get("content"), list):
        return value
    parts = []
    for part in value["content"]:
        if is_image(part):
            members = ("image", "image_url", "path", "url", "bytes")
            cell = next((part[name] for name in members if part.get(name) is not None), None)
            cells.append(cell)
            part = {"type": "text", "text": MARK}
        parts.append(part)
    return {**value, "content": parts}


def read_picture(where: str, cell: Any, folder: Path) -> Picture:
    """The image in a cell, decoded once, so that a damaged one is found here."""
    path = ""
    if isinstance(cell, dict):
        url, content = cell.get("url"), cell.get("bytes")
        cell = url if url is not None else content if content is not None else cell.get("path")
    if isinstance(cell, Pillow.Image):  # a digest is of bytes, and PNG loses nothing
        _check_pixels(where, cell.size)
        buffer = BytesIO()
        ImageOps.exif_transpose(cell).convert("RGB").save(buffer, "PNG")
        content = buffer.getvalue()
    elif isinstance(cell, bytes):
        content = cell
    elif isinstance(cell, str) and cell.startswith("data:"):
        content = _of_data_url(where, cell)
    elif isinstance(cell, str) and "://" in cell:
        raise DataError(f"{where}: image {shown(cell)} is not on this machine; download it first")
    elif isinstance(cell, str):
        file = Path(cell)
        file = file if file.exists() else folder / file
        path, content = str(file), _read(where, file)
    else:
        raise DataError(
            f"{where}: image {shown(cell)} is of type {type(cell).__name__}; expected a path, "
            'bytes, an image of Pillow or {"bytes", "path"}'
        )
    if len(content) > MAX_BYTES:
        raise DataError(f"{where}: an image has {len(content):,} bytes; at most {MAX_BYTES:,}")
    size = decoded(f"{where}: image {path}".rstrip(), content).size
    held = b"" if path else content
    return Picture(hashlib.sha256(content).hexdigest(), path, size, held)


def decoded(what: str, content: bytes) -> Pillow.Image:
    """The pixels of a file's bytes, upright and in RGB."""
    try:
        with Pillow.open(BytesIO(content), formats=FORMATS) as image:
            _check_pixels(what, image.size)
            return ImageOps.exif_transpose(image).convert("RGB")
    except DataError:
        raise
    except Pillow.DecompressionBombError as error:
        raise DataError(f"{what}: {one_line(error)}; make it smaller") from error
    except UnidentifiedImageError as error:
        raise DataError(f"{what} is not one of {', '.join(FORMATS)}; convert it") from error
    except Exception as error:  # Pillow's readers raise what they like
        raise DataError(f"{what} cannot be read ({one_line(error)[:200]}); replace it") from error


def _check_pixels(what: str, size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MAX_PIXELS or min(size) < 1 or max(size) > 200 * min(size):
        raise DataError(
            f"{what} has {width} x {height} pixels; at most {MAX_PIXELS:,} pixels and a side 200 "
            "times as long as the other are supported: make it smaller"
        )


def _read(where: str, path: Path) -> bytes:
    try:
        return read_bounded(path, MAX_BYTES)
    except OSError as error:
        raise DataError(f"{where}: image {path} cannot be read ({one_line(error)})") from error


def _of_data_url(where: str, url: str) -> bytes:
    head, _, body = url.partition(",")
    try:
        if not head.endswith(";base64") or len(body) > 2 * MAX_BYTES:
            raise ValueError("it is not base64, or it is too long")
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise DataError(f"{where}: image {shown(url)} cannot be read ({error})") from error
