"""Position of each token of a completion in its text, with the model's ``tokenizer.json`` alone,
from its folder or the Hub's cache on this machine. Neither torch nor Transformers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from reason_llm.errors import ModelError, one_line
from reason_llm.files import MIB, Panic, cached, read_bounded, without_panics

MAX_JSON_BYTES = 64 * MIB


@dataclass(slots=True)
class TokenTexts:
    """A tokenizer's tokens as pieces of text."""

    tokenizer: Tokenizer
    _pieces: dict[int, str] = field(default_factory=dict)

    @classmethod
    def load(cls, model: str) -> "TokenTexts":
        """The tokenizer of a model's folder, or of a Hub id in this machine's cache."""
        folder, name = Path(model), "tokenizer.json"
        path = folder / name if folder.is_dir() else cached(model, name)
        if path is None:
            raise ModelError(f"{model} has no tokenizer.json on this machine")
        try:
            content = read_bounded(path, MAX_JSON_BYTES)
            with without_panics():
                tokenizer = Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
        return cls(tokenizer)

    def lengths(self, token_ids: Sequence[int], text: str) -> list[int] | None:
        """Number of UTF-16 units (as JavaScript counts) of ``text`` for each token; 0 for the end
        token that the text leaves out, and for one whose bytes only the next token completes to a
        character. None if the tokens do not spell the text."""
        try:
            with without_panics():
                for ids in (token_ids, token_ids[:-1]):
                    pieces = self._pieces_of(ids, text)
                    if "".join(pieces) == text:
                        break
        except Exception as error:  # the library raises nothing narrower
            if type(error) not in (Exception, Panic):
                raise
            return None
        if "".join(pieces) != text:
            return None
        pieces += [""] * (len(token_ids) - len(pieces))
        return [len(piece.encode("utf-16-le")) // 2 for piece in pieces]

    def _pieces_of(self, token_ids: Sequence[int], text: str) -> list[str]:
        pieces = [self._piece(id) for id in token_ids]
        if "".join(pieces) != text:  # a token's text may depend on those before it
            stream = DecodeStream(skip_special_tokens=False)
            pieces = [stream.step(self.tokenizer, id) or "" for id in token_ids]
        return pieces

    def _piece(self, id: int) -> str:
        if id not in self._pieces:
            is_known = self.tokenizer.id_to_token(id) is not None
            self._pieces[id] = (
                self.tokenizer.decode([id], skip_special_tokens=False) if is_known else ""
            )
        return self._pieces[id]
