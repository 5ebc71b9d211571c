"""Prompts and rows to learn from, out of data files and Hub sets."""

from reason_llm.data.attachments import IMAGE_COLUMNS, IMAGES, MARK, folder_of, is_image, with_parts
from reason_llm.data.faults import Faults
from reason_llm.data.forms import SIDES, Completed, Example, Problem
from reason_llm.data.kept import load_kept
from reason_llm.data.load import (
    check_files,
    check_lengths,
    load_data,
    load_evaluation,
    renderer_of,
)
from reason_llm.data.messages import (
    Messages,
    shown,
)
from reason_llm.data.own_code import (
    file_of,
    is_published,
    load_function,
    module_file,
    own_sources,
    place_of,
    with_imports,
)
from reason_llm.data.played import (
    Player,
    RolloutSide,
    check_reward,
    is_played,
    open_played,
    player_of,
    rollout_sides,
)
from reason_llm.data.render import Renderer, order
from reason_llm.data.rows import GYM, Row, gym_maker, gym_tasks, is_empty, options_of, read_rows
from reason_llm.data.sets import Data, DataSet
from reason_llm.data.templates import (
    chat_template,
    reads_date,
    system_prompt,
    today,
    unasked_form,
)
from reason_llm.data.token_rows import tokenizer_digest
from reason_llm.data.tools import Call, plain_messages, said_before
