"""Silencing of libraries that print beside the console."""

import transformers


def quiet_libraries() -> None:
    """Let no library print beside the console."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
