"""A language model behind a URL, asked by HTTP: each request with a time limit, further tries and a
bound on its answer, which is read as data alone. The key of the service is read from the
environment and stands in no file and no message.
"""

import os
import time
from collections.abc import Mapping
from threading import Lock
from typing import Any

import httpx
import orjson

from reason_llm.config import ServiceSection
from reason_llm.errors import ConfigError, ReasonError, one_line, printable
from reason_llm.files import MIB
from reason_llm.workers import within

FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.5, 8.0
TRIES = 3
"""Tries of a request if the server is unreachable, busy or fails."""
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
"""Status codes of a server that may answer the next time."""
MAX_UNANSWERED = 8
"""Consecutive requests without an answer, after which the service is not asked again."""


class _Again(Exception):
    """A failure after which the server may answer the next request."""


class Service:
    """One address of the service.

    Args:
        what: its name in messages, such as ``the judge``.
        silent: the error of a service that does not answer any more.

    Raises:
        ConfigError: the key is not there.
    """

    def __init__(
        self, what: str, url: str, options: ServiceSection, silent: type[ReasonError]
    ) -> None:
        self.url = url
        self._what = what
        self._options = options
        self._silent = silent
        self._key = _key(what, options.key_env)
        self._client = httpx.Client(
            timeout=options.timeout_seconds,
            follow_redirects=False,
            limits=httpx.Limits(),  # the caller limits how many requests there are at once
        )
        self._lock = Lock()
        self._num_unanswered = 0
        self.close = self._client.close

    def ask(self, body: Mapping[str, Any], max_bytes: int) -> bytes:
        """The answer to one request, at most so long.

        Raises:
            ValueError: it is too large, or a refusal. ConnectionError, TimeoutError: none came.
            ReasonError: ``silent``; none came ``MAX_UNANSWERED`` times in a row.
        """
        options, wait, content = self._options, FIRST_WAIT_SECONDS, orjson.dumps(body)
        # Silence is checked before each try, since other threads count failures at the same time.
        for left in reversed(range(TRIES)):
            self._check_silence()
            try:
                answer = within(
                    options.timeout_seconds, self.url, lambda: self._post(content, max_bytes)
                )
                break
            except (_Again, TimeoutError) as error:
                if not left:
                    with self._lock:
                        self._num_unanswered += 1
                    self._check_silence()
                    kind = TimeoutError if isinstance(error, TimeoutError) else ConnectionError
                    raise kind(f"{one_line(error)} ({TRIES} tries)") from None
            time.sleep(wait)
            wait = min(2 * wait, MAX_WAIT_SECONDS)
        self._num_unanswered = 0
        return answer

    def _check_silence(self) -> None:
        if self._num_unanswered >= MAX_UNANSWERED:
            raise self._silent(
                f"{self._what} at {self.url} did not answer {self._num_unanswered} requests in a "
                "row; start it, or raise its timeout_seconds, and run the same command again: what "
                "was sampled and judged is kept"
            )

    def _post(self, content: bytes, max_bytes: int) -> bytes:
        """The body of the answer to one request; raises _Again where it may come the next time."""
        # Not packed: a packed answer could be a thousand times as large as what comes.
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        body, until = bytearray(), time.monotonic() + self._options.timeout_seconds
        try:
            with self._client.stream("POST", self.url, content=content, headers=headers) as answer:
                for chunk in answer.iter_raw():
                    body += chunk
                    if len(body) > max_bytes:
                        raise ValueError(f"{self._what}'s answer exceeds {max_bytes / MIB:.3g} MiB")
                    if time.monotonic() > until:  # httpx bounds each chunk, not the whole
                        raise _Again(f"{self.url} answers too slowly")
                status = answer.status_code
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
            detail = self._without_key(one_line(error)) or type(error).__name__
            raise _Again(f"{self.url} does not answer ({detail[:200]})") from None
        if status == 200:
            return bytes(body)
        detail = self._without_key(printable(body[:200].decode(errors="replace")))
        problem = f"{self.url} answered with status {status}: {detail}"
        if status in AGAIN:
            raise _Again(problem)
        raise ValueError(problem)

    def _without_key(self, text: str) -> str:
        return text if self._key is None else text.replace(self._key, f"<{self._options.key_env}>")


def _key(what: str, name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name, "")
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"key_env={name} of {what}: the environment variable is not set, or holds no key; set "
            "it to the service's key"
        )
    return key
