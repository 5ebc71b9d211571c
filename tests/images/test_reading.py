"""Rows with images, and what is refused in one line."""

import base64
import hashlib
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from digits import image_rows, images_of, make_digits, make_model, section_of
from PIL import Image
from safetensors.torch import load_file

import families
from conftest import TINY, config_of
from reason_llm.data import Data, folder_of, kept, load_data
from reason_llm.errors import ConfigError, DataError
from reason_llm.images import files, thumbnail
from reason_llm.images.files import Image as Record
from reason_llm.model.base import load_tokenizer
from reason_llm.rollout import ROW, Attachment

IMAGE = make_digits.draw(3, random.Random(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    make_model(folder / "model")
    IMAGE.save(folder / "three.png")
    return folder


def load(folder: Path, *rows: dict[str, Any], **options: Any) -> Data:
    tree = {
        "model": section_of(options.pop("path", str(folder / "model"))),
        "data": {"train": "python:rows", "system_prompt": "none"},
        "score": {"rewards": [{"name": "think_answer_tags"}]},
        "sample": {"max_new_tokens": 16},
    }
    extra_columns = options.pop("extra_columns", ())
    config = config_of(tree, **options)
    config.data.given["python:rows"] = [{"question": "Which?", "answer": "3"} | row for row in rows]
    tokenizer = load_tokenizer(config.model.path)
    return load_data(config, tokenizer, 256, extra_columns=extra_columns)


def png(image: Image.Image = IMAGE, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def test_every_form_of_an_image_is_the_same_image(folder: Path) -> None:
    path = str(folder / "three.png")
    content = Path(path).read_bytes()
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    part = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Which?"}]
    rows: list[dict[str, Any]] = [
        {"image": path},
        {"images": [content]},
        {"image": {"bytes": content, "path": "three.png"}},
        {"image": {"bytes": None, "path": path}},
        {"Image": url},
        {"question": None, "prompt": [{"role": "user", "content": part}]},
        {"image": IMAGE},
    ]
    data = load(folder, *rows, data__deduplicate=False)
    assert len({prompt.token_ids for prompt in data.prompts}) == 1
    (digest,) = {images_of(prompt)[0].sha256 for prompt in data.prompts[:-1]}
    pixels = [data.attachments.pixels(images_of(prompt)[0])[0] for prompt in data.prompts]
    assert all(bool((each == pixels[0]).all()) for each in pixels)
    assert digest == hashlib.sha256(content).hexdigest()
    paths = [images_of(prompt)[0].path for prompt in data.prompts]
    assert paths == [path, "", "", path, "", "", ""]


def test_places_in_the_text(folder: Path) -> None:
    image = str(folder / "three.png")
    first, tagged = load(
        folder,
        {"image": image, "question": "Which?"},
        {"image": image, "question": "Look: <image> Which?"},
    ).prompts
    assert first.text.startswith("<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Wh")
    assert "user\nLook: <|vision_start|><|image_pad|><|vision_end|> Which" in tagged.text
    assert images_of(tagged)[0].start > images_of(first)[0].start


def test_rewards_of_trl_s_form_get_parts(folder: Path) -> None:
    part = [{"type": "image"}, {"type": "text", "text": "Which?"}]
    row = {"image": IMAGE, "question": None, "prompt": [{"role": "user", "content": part}]}
    (prompt,) = load(folder, row, extra_columns={ROW}).prompts
    assert prompt.extra[ROW]["prompt"] == [{"role": "user", "content": part}]


def test_a_row_that_spells_the_image_token_has_it_as_text(folder: Path) -> None:
    question = "<|image_pad|> Which?"
    (prompt,) = load(folder, {"image": str(folder / "three.png"), "question": question}).prompts
    data_id = load_tokenizer(str(folder / "model")).convert_tokens_to_ids("<|image_pad|>")
    assert prompt.token_ids.count(data_id) == images_of(prompt)[0].length == 4
    assert question in prompt.text


def test_the_same_question_about_another_image_is_another_question(folder: Path) -> None:
    other = make_digits.draw(4, random.Random(1))
    rows = [{"image": IMAGE}, {"image": other}, {"image": IMAGE}]
    assert len(load(folder, *rows, data__deduplicate=True).prompts) == 2


def huge(side: int) -> bytes:
    """A PNG of so many pixels a side in a few kilobytes."""
    return png(Image.new("1", (side, side)))


REFUSED = {
    "none.png": "none.png cannot be read",
    "https://example.org/a.png": "is not on this machine",
    "data:image/png;base64,%%%": "cannot be read",
}


@pytest.mark.parametrize("cell", REFUSED)
def test_what_cannot_be_read_is_refused(folder: Path, cell: str) -> None:
    with pytest.raises(DataError, match=REFUSED[cell]):
        load(folder, {"image": cell})


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        (png()[:60], "cannot be read"),
        (b"no image", "is not one of PNG, JPEG"),
        (png(kind="TIFF"), "is not one of PNG, JPEG"),
        (huge(1 << 14), "268435456 pixels.* make it smaller"),
        (huge(9000), "has 9000 x 9000 pixels"),
        (png(Image.new("RGB", (1000, 2))), "a side 200 times"),
        (7, "is of type int"),
        ([IMAGE] * 65, "has 65 images"),
    ],
)
def test_damaged_and_huge_images_are_refused(folder: Path, cell: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem) as refused:
        load(folder, {"image": cell})
    assert "\n" not in str(refused.value)


def test_bytes_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    with pytest.raises(DataError, match=r"three\.png"):
        load(folder, {"image": str(folder / "three.png")})
    with pytest.raises(DataError, match="at most 100"):
        load(folder, {"image": png()})


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"image": IMAGE, "question": "a \ufffc b", "images": None}, None),
        ({"images": [IMAGE, IMAGE], "question": "\ufffc"}, "U\\+FFFC"),
    ],
)
def test_the_mark_in_a_text(folder: Path, row: dict[str, Any], problem: str | None) -> None:
    if problem is None:  # as many as images: it is read as the place of one
        assert len(images_of(load(folder, row).prompts[0])) == 1
        return
    with pytest.raises(DataError, match=problem):
        load(folder, row)


def test_a_changed_file_is_noticed(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.png"
    IMAGE.save(file)
    data = load(folder, {"image": str(file)})
    make_digits.draw(5, random.Random(2)).save(file)
    with pytest.raises(DataError, match=r"own\.png was changed"):
        data.attachments.pixels(images_of(data.prompts[0])[0])


def test_two_columns_of_images_are_refused(folder: Path) -> None:
    row = {"image": IMAGE, "image_path": str(folder / "three.png")}
    with pytest.raises(DataError, match=r"columns image, image_path all hold images; list those"):
        load(folder, row)
    (prompt,) = load(folder, row, data__columns={"ignore": ["image"]}).prompts
    assert images_of(prompt)[0].path == row["image_path"]


def test_a_thumbnail_is_bounded_and_of_the_image_that_was_read(tmp_path: Path) -> None:
    rng = random.Random(3)
    noise = Image.frombytes("RGB", (500, 250), rng.randbytes(500 * 250 * 3))
    for name in ("a.png", "b.jpg"):
        noise.save(file := tmp_path / name)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        record = Record(digest, str(file), (1, 2, 2), 0, 1)
        shown, url = thumbnail(record.record)
        content = base64.b64decode(url.removeprefix("data:image/webp;base64,"))
        assert shown == name and len(content) < 10_000
        assert Image.open(io.BytesIO(content)).size == (96, 48)
    held = Record("0" * 64, "", (1, 2, 2), 0, 1)
    assert thumbnail(held.record) == ("image 000000000000, which its row holds", "")
    changed = Record("0" * 64, str(file), (1, 2, 2), 0, 1)
    assert thumbnail(changed.record) == ("b.jpg, which is gone or was changed", "")


@pytest.mark.parametrize(
    "about",
    [{}, {"path": ""}, {"path": "", "grid": [1, 2]}, {"path": "", "grid": [1, 2, 2], "a": 1}],
)
def test_a_damaged_record_is_refused(about: dict[str, Any]) -> None:
    """What only the slice knows of an attachment, it checks where it reads it."""
    with pytest.raises(DataError, match="record of an image is damaged"):
        thumbnail(Attachment("images", "0" * 64, 0, 1, about))


def test_the_kind_of_a_record_names_no_other_module() -> None:
    with pytest.raises(DataError, match=r"attachment of kind 'replicas'; known: images"):
        folder_of("replicas", "the report of a:1")


def test_rows_with_images_are_read_at_each_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file is never kept, so the limit is lowered; a changed image is then another one."""
    monkeypatch.setattr(kept, "LEAST_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = tmp_path / "own.png"
    file = tmp_path / "rows.jsonl"
    digests = []
    for digit in (3, 4):
        make_digits.draw(digit, random.Random(0)).save(own)
        file.write_text(json.dumps({"image": "own.png", "question": "Which?", "answer": "3"}))
        tree = {"model": section_of(str(folder / "model")),
                "data": {"train": str(file), "system_prompt": "none"},
                "score": {"rewards": [{"name": "think_answer_tags"}]},
                "sample": {"max_new_tokens": 16}}  # fmt: skip
        config = config_of(tree)
        tokenizer = load_tokenizer(config.model.path)
        data = kept.load_kept(config, tokenizer, 256, (), (), lambda _: None)
        data.attachments.pixels(images_of(data.prompts[0])[0])
        digests.append(images_of(data.prompts[0])[0].sha256)
    assert digests[0] != digests[1]


def test_sizes_of_the_images_and_of_the_part_that_reads_them(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    tree = {"model": section_of(path), "score": {"rewards": [{"name": "think_answer_tags"}]},
            "data": {"train": str(image_rows(tmp_path)), "system_prompt": "none"},
            "sample": {"max_new_tokens": 16}}  # fmt: skip
    sizes = load_data(config_of(tree), load_tokenizer(path), 256).attachments.sizes
    stored = load_file(Path(path) / "model.safetensors")
    assert sizes.weights == sum(each.numel() for n, each in stored.items() if ".visual." in n)
    # Images of 4, 4, 6 and 4 tokens of 16 x 16 pixels; features for the input and one layer of 64.
    assert (sizes.max_tokens, sizes.all_tokens, sizes.token_pixels) == (6, 18, 256)
    assert (sizes.max_images, sizes.features) == (2, 128)


def test_a_model_of_text_refuses_images(folder: Path) -> None:
    with pytest.raises(DataError, match=r"column 'image' is .* not supported"):
        load(folder, {"image": str(folder / "three.png")}, path=str(TINY))
    path = str(folder / "three.png")
    data = load(folder, {"image": path}, path=str(TINY), data__columns={"ignore": ["image"]})
    assert data.attachments is None


def test_gemma_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = families.make(tmp_path / "gemma3", "gemma3")
    with pytest.raises(
        ConfigError, match=r"gemma3, and its image tokens attend .* both directions"
    ):
        load(tmp_path, {"image": IMAGE}, path=path)


def test_options_that_do_not_go_with_images(folder: Path) -> None:
    data = load(folder, {"image": IMAGE})
    for options, named in [
        ({"sample__environment": "examples.py:Game"}, "sample.environment=examples.py:Game"),
    ]:
        tree = {"model": section_of(str(folder / "model")), "data": {"train": "a.jsonl"}}
        with pytest.raises(ConfigError, match=named):
            data.attachments.check(config_of(tree, **options), is_alone=True)


def test_rows_of_files_have_paths_relative_to_them(tmp_path: Path) -> None:
    rows = image_rows(tmp_path)
    assert json.loads(rows.read_text().splitlines()[0])["image"] == "a.png"
