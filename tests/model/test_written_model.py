"""A whole model that is not what was written, in a folder that carries its digests: every command
that reads it refuses it, and reads it again once the digests are removed on purpose."""

import io
import shutil
from pathlib import Path

import orjson
import pytest
import yaml
from test_sequence_classifier import make

from conftest import ROOT, TINY, small_config
from reason_llm.app.cli import main
from reason_llm.files import MANIFEST, PIECE_BYTES, check_digests, replacing_folder
from reason_llm.model.folder import check_weights
from reason_llm.run import SILENT
from reason_llm.run.start.prepare import prepare
from reason_llm.run.store import folder as run_folder

SET = ["--sets", f"sums={ROOT / 'data' / 'arithmetic_test.jsonl'}"]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained all weights, another reward model, and a config that names both."""
    home = tmp_path_factory.mktemp("home")
    run = home / "runs" / "r"
    options = {"run__name": "r", "model__train": "full", "model__adapter": {}}
    config = small_config(home, **options)
    for name in ("model", "model_best"):
        with replacing_folder(run / name) as beside:
            for file in TINY.iterdir():
                shutil.copyfile(file, beside / file.name)
    with replacing_folder(home / "scorer") as beside:
        make(beside)
    (run / run_folder.CONFIG).write_bytes(run_folder.config_to_bytes(config))
    (run / "summary.json").write_bytes(orjson.dumps({"steps": 3}))
    tree = small_config(home, run__name="next", run__steps=1).model_dump(mode="json")
    (home / "next.yaml").write_text(yaml.safe_dump(tree))
    return home


def damaged(given: Path, file: str, home: Path) -> Path:
    """A copy in which 25 bytes of a file are others."""
    shutil.copytree(given, home, dirs_exist_ok=True)
    content = bytearray((home / file).read_bytes())
    place = len(content) // 2
    content[place : place + 25] = bytes(each ^ 1 for each in content[place : place + 25])
    (home / file).write_bytes(content)
    return home


RUN, NEXT = "{home}/runs/r", ["train", "{home}/next.yaml", "--run.directory", "{home}/runs"]
READERS = {
    "evaluate": ("model", ["evaluate", RUN, *SET]),
    "evaluate the folder": ("model", ["evaluate", f"{RUN}/model", *SET, "--out", "{home}/out"]),
    "evaluate the best": ("model_best", ["evaluate", RUN, "--which", "best", *SET]),
    "compare": ("model", ["evaluate", str(TINY), "--compare", f"{RUN}/model", *SET,
                          "--out", "{home}/out"]),
    "chat": ("model", ["chat", RUN]),
    "chat with the best": ("model_best", ["chat", RUN, "--which", "best"]),
    "export": ("model", ["export", RUN, "--out", "{home}/out"]),
    "export the best": ("model_best", ["export", RUN, "--out", "{home}/out", "--which", "best"]),
    "export over the base": ("model", ["export", RUN, "--out", "{home}/out",
                                       "--base", f"{RUN}/model"]),
    "model.path": ("model", [*NEXT, "--model.path", f"{RUN}/model"]),
    "data check": ("model", [*NEXT, "--data-check", "--model.path", f"{RUN}/model"]),
    "teacher.model": ("model", [*NEXT, "--teacher.model", f"{RUN}/model",
                                "--algorithm.name", "opd", "--algorithm.kl", "null",
                                "--sample.completions_per_prompt", "1"]),
    "a reward model": ("scorer", [*NEXT, "--score.rewards",
                                  "[think_answer_tags, {{name: reward_model, options: "
                                  "{{path: '{home}/scorer', normalize: none}}}}]"]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("reader", "file"),
    [
        (reader, file)
        for reader in READERS
        for file in ("model.safetensors", "tokenizer.json")
        if (reader, file) != ("data check", "model.safetensors")  # it reads no weight
    ],
)
def test_every_reader_of_a_whole_model_compares_it(
    reader: str,
    file: str,
    given: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"What is 3 + 4?")))
    folder, words = READERS[reader]
    where = folder if folder == "scorer" else f"runs/r/{folder}"
    home = damaged(given, f"{where}/{file}", tmp_path)
    code = main([word.format(home=home) for word in words])
    shown = capsys.readouterr().err
    assert code == 2, shown
    assert f"error: {home / where}: {file} is not what was written: its SHA-256 is" in shown
    assert f"or remove {MANIFEST} if it was edited on purpose" in shown
    assert not (home / "out").exists()


def test_without_digests_a_model_is_read_as_it_is(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = damaged(given, "runs/r/model/model.safetensors", tmp_path)
    (home / "runs" / "r" / "model" / MANIFEST).unlink()
    limit = ["--data.limit", "2", "--eval.limit", "2", "--sample.max_new_tokens", "4"]
    code = main(["evaluate", str(home / "runs" / "r"), *SET, *limit, "--out", str(home / "out")])
    assert code == 0, capsys.readouterr().err


def test_of_a_checkpoint_the_model_is_compared_and_not_its_optimizer(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    with replacing_folder(folder) as beside:
        for name in ("model.safetensors", "optimizer.safetensors"):
            (beside / name).write_bytes(b"a" * 99)
    (folder / "optimizer.safetensors").write_bytes(b"b" * 99)
    check_weights(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="missing"):
        check_weights(str(folder))


@pytest.mark.parametrize("at", [0, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 9])
def test_every_byte_of_a_large_file_counts(at: int, tmp_path: Path) -> None:
    folder = tmp_path / "large"
    with replacing_folder(folder) as beside:
        (beside / "weights").write_bytes(bytes(PIECE_BYTES + 10))
    check_digests(folder)
    with (folder / "weights").open("r+b") as file:
        file.seek(at)
        file.write(b"1")
    with pytest.raises(ValueError, match="weights is not what was written"):
        check_digests(folder)


def test_a_run_knows_the_tokenizer_and_the_template_of_its_reward_model(tmp_path: Path) -> None:
    """By the digest with which alone it goes on."""
    scorer = make(tmp_path / "scorer")
    reward = {"name": "reward_model", "options": {"path": str(scorer), "normalize": "none"}}
    config = small_config(tmp_path, score__rewards=[{"name": "think_answer_tags"}, reward])
    before = prepare(config, SILENT).run.identity["score"]["reward_models_sha256"]
    for name in ("tokenizer.json", "chat_template.jinja"):
        with (scorer / name).open("a") as file:
            file.write("\n")
        after = prepare(config, SILENT).run.identity["score"]["reward_models_sha256"]
        assert {*after} == {"reward_model"} and after != before
        before = after
