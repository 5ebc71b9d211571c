"""Images in prompts: read from rows, prepared by the model's own processor, and passed through its
frozen tower. Imported where a row has an image.

Not here: video and audio, families whose image tokens attend in both directions.
"""

from reason_llm.images.files import thumbnail
from reason_llm.images.prompts import Images, open_attachments

__all__ = ["Images", "open_attachments", "thumbnail"]
