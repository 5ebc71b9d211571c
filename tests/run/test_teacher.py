"""What the teacher is asked: teacher.prompt filled in, the student's own prompt unchanged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reason_llm.config import Config
from reason_llm.data import Data
from reason_llm.errors import DataError, TrainingError
from reason_llm.model import Datum, adapters
from reason_llm.run import SILENT
from reason_llm.run.opening import open_run
from reason_llm.run.start.prepare import prepare

HINT = "{prompt} Psst: {answer}."
OPD = {"algorithm": {"name": "opd"}, "teacher": {"prompt": HINT}}


def rows(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(load: Callable[..., Data], tokenizer: Any, path: Path, **options: Any) -> list[str]:
    """What the teacher is asked for each row, as text."""
    data = load(path, **{"algorithm__name": "opd", "teacher__prompt": HINT} | options)
    return [tokenizer.decode(data.reader_prompts["teacher"][p.token_ids]) for p in data.prompts]


def test_the_hint_holds_question_and_answer_in_one_pass(
    tmp_path: Path, load: Callable[..., Data], tokenizer: Any
) -> None:
    path = rows(
        tmp_path,
        {"question": "What is {answer}?", "answer": "{prompt}"},
        {
            "messages": [
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "two"},
                {"role": "user", "content": "three"},
            ],
            "gt_answer": "4",
        },
    )
    first, second = asked(load, tokenizer, path)
    assert "user\nWhat is {answer}? Psst: {prompt}.<|im_end|>" in first
    assert "user\none<|im_end|>" in second
    assert "assistant\ntwo<|im_end|>" in second
    assert "user\nthree Psst: 4.<|im_end|>" in second


def test_without_teacher_prompt_there_is_none(tmp_path: Path, load: Callable[..., Data]) -> None:
    assert load(rows(tmp_path, {"question": "1?", "answer": "1"})).reader_prompts == {}


def test_a_row_without_answer_or_room_is_one_line(
    tmp_path: Path, load: Callable[..., Data], tokenizer: Any
) -> None:
    path = rows(tmp_path, {"question": "What is 1 + 2?", "answer": "3"})
    room = len(load(path).prompts[0].token_ids)
    with pytest.raises(
        DataError, match=rf"rows\.jsonl:1: with teacher\.prompt .* leaves {room} for it"
    ):
        asked(load, tokenizer, path, room=room)
    path = rows(tmp_path, {"prompt": "What is 1 + 2?"})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: has no gold answer .* teacher\.prompt"):
        asked(load, tokenizer, path, data__form="prompts")


def test_one_question_with_two_answers_is_refused(
    tmp_path: Path, load: Callable[..., Data], tokenizer: Any
) -> None:
    path = rows(tmp_path, {"question": "1?", "answer": "1"}, {"question": "1?", "answer": "2"})
    with pytest.raises(DataError, match=r"rows\.jsonl:2: asks what .*rows\.jsonl:1 asks"):
        asked(load, tokenizer, path)
    assert len(asked(load, tokenizer, path, data__deduplicate=True)) == 1


def test_the_teacher_reads_its_prompt_and_the_student_its_own(
    small_run: Callable[..., Config],
) -> None:
    job = prepare(small_run(**OPD, run__steps=1, sample__temperature=0.7), SILENT)
    longest = max(map(len, job.data.reader_prompts["teacher"].values()))
    assert job.plan.context_tokens == longest + 32  # max_new_tokens
    assert longest > max(len(prompt.token_ids) for prompt in job.data.prompts)
    with open_run(job, SILENT) as run:
        student = run.learners.policy
        prompt = job.data.prompts[0]
        row = Datum.of(prompt.token_ids, (5, 6, 2), columns={"sampler_logprobs": [-1.0] * 3})
        (seen,) = student.prepared([row])
        assert (seen.ids == row.ids).all()
        hinted = job.data.reader_prompts["teacher"][prompt.token_ids]
        wanted, _ = student.measure([Datum.of(hinted, (5, 6, 2))], "reference")
        plain, _ = student.measure([row], "reference")
        with torch.no_grad(), adapters.reference(run.model.policy):
            ids = torch.tensor([[*hinted, 5, 6, 2]])
            logits = run.model.logits(run.model.hidden_states(ids))[0, len(hinted) - 1 : -1]
        at_temperature = (logits / 0.7).log_softmax(-1)[range(3), [5, 6, 2]]
        torch.testing.assert_close(wanted[0], at_temperature, atol=1e-4, rtol=1e-4)
        assert torch.equal(seen.on_trained("teacher_logprobs"), wanted[0])
        assert not torch.allclose(wanted[0], plain[0], atol=1e-3)
        torch.testing.assert_close(
            seen.on_trained("advantages"), wanted[0] - seen.on_trained("old_logprobs")
        )
        assert seen.on_trained("old_logprobs").tolist() == pytest.approx(plain[0].tolist())
        with pytest.raises(TrainingError, match=r"asks what no row of data\.train asks"):
            student.prepared([Datum.of((1, 2, 3), (5, 6, 2), columns=row.columns)])
