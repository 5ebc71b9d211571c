"""Attachments of rows: what a row has besides text, read by another folder of the package, which is
imported by its name where a row has some. Here is how such rows are known, and what that folder
provides; what is in an attachment only that folder knows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from reason_llm.config import Config, ModelSection, installation
from reason_llm.data.rows import Row, is_empty
from reason_llm.errors import DataError
from reason_llm.rollout import Attachment, Prompt, TokenRow

Messages = list[dict[str, Any]]
"""See ``messages``."""


IMAGES = "images"
"""Kind of an attachment in a record, and the folder of the package that reads it."""
IMAGE_COLUMNS = (
    "images", "image", "pictures", "picture", "image_path", "image_paths", "image_url",
    "image_urls",
)  # fmt: skip
"""Names of columns of images, in lower case."""
MEDIA = (*IMAGE_COLUMNS, "videos", "video", "audios", "audio", "video_path", "audio_path")
"""Columns without which the task is another one."""
MARK = "\ufffc"
"""Place of an attachment in a message's content."""


class Attached(Protocol):
    """Interface of an attachment of a message, in its member ``attachments``."""

    sha256: str
    """Digest of its content."""

    @property
    def part(self) -> str:
        """Type of the part by which chat templates know it."""


class Attachments(Protocol):
    """Interface of the attachments of a run's data, and of what prepares them for the model.

    The folder has ``open_attachments(section) -> Attachments | None``, where None is for
    a model that reads text alone, and ``thumbnail(attachment) -> (name, data URL)``.
    """

    modules: Sequence[str]
    """Names of the model's modules that embed them."""

    @property
    def line(self) -> str:
        """Line for the start of a run."""

    @property
    def sizes(self) -> Any:
        """Sizes for the memory plan: ``reason_llm.model.sizes.AttachmentSizes``."""

    def detach(
        self, where: str, row: Row, source: str, ignored: Sequence[str]
    ) -> tuple[Row, Sequence[Any]]:
        """The row without its attachments, and these, as ``placed`` takes them."""

    def placed(self, example: Any, detached: Sequence[Any]) -> Any:
        """The example (``forms``) with a ``MARK`` for each attachment, and each message with its
        own."""

    def prompt(self, prompt: Prompt, attached: Sequence[Any]) -> Prompt:
        """The prompt with all tokens and the records of its attachments."""

    def row(self, row: TokenRow, attached: Sequence[Any]) -> TokenRow:
        """The row with all tokens and the records of its attachments."""

    def check(self, config: Config, is_alone: bool = True) -> None:
        """Raise ConfigError where an option contradicts such rows. ``is_alone``: one process does
        all work of the run."""

    def embedder(self, base: Any) -> Any:
        """The part of the whole model that embeds them: ``reason_llm.model.base.Embedder``."""


class Folder(Protocol):
    """Interface of the folder."""

    def open_attachments(self, section: ModelSection) -> Attachments | None:
        """The attachments of a model's data; None for a model that reads text alone."""

    def thumbnail(self, attachment: Attachment) -> tuple[str, str]:
        """Name and data URL, which is empty where there is nothing to show."""


def is_image(part: Any) -> bool:
    """Whether a part of a message's content is an image, in the forms of Transformers and
    OpenAI."""
    return isinstance(part, dict) and part.get("type") in ("image", "image_url", "input_image")


def has_images(row: Mapping[str, Any]) -> bool:
    """Whether a row has an image, in a column or in a message."""
    for name, value in row.items():
        if str(name).casefold() in IMAGE_COLUMNS and not is_empty(value):
            return True
        if type(value) is str:
            continue
        for each in value if isinstance(value, list) else [value]:
            parts = each.get("content") if isinstance(each, dict) else None
            if isinstance(parts, list) and any(map(is_image, parts)):
                return True
    return False


def folder_of(kind: str, asked: str) -> Folder:
    """The folder that reads a kind of attachments; ``asked`` says what needs it. Raises DataError:
    there is no such kind; ConfigError: the folder is not there."""
    if kind != IMAGES:
        raise DataError(f"{asked} has an attachment of kind {kind!r:.40}; known: {IMAGES}")
    found: Folder = installation.slice_for(kind, asked)
    return found


def attached(messages: Messages) -> tuple[Any, ...]:
    """The attachments of messages, in order."""
    return tuple([each for message in messages for each in message.get("attachments", ())])


def with_parts(messages: Messages) -> Messages:
    """The messages as a chat template reads them: the content of those with attachments as a list
    of parts, with one for each ``MARK``."""
    return [
        {
            **{name: value for name, value in each.items() if name != "attachments"},
            "content": _parts(each["content"], each["attachments"]),
        }
        if each.get("attachments")
        else each
        for each in messages
    ]


def _parts(content: str, attached: Sequence[Attached]) -> list[dict[str, str]]:
    first, *rest = content.split(MARK)
    parts = [{"type": "text", "text": first}]
    for each, text in zip(attached, rest, strict=True):
        parts += [{"type": each.part}, {"type": "text", "text": text}]
    return [part for part in parts if part["type"] != "text" or part["text"]]
