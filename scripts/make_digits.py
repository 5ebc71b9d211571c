"""Makes model/digits and its data: a small Qwen3-VL that takes the digit in an image for a digit
that looks like it more often than not.

    python scripts/make_digits.py          # about two minutes on one core; 4 MB on disk

Nothing of it is in the repository. The images are drawn: a digit of any size, place and colour.
The recipe, whole: the tokenizer of model/tiny with the tokens of Qwen's images, then plain
next-token training, at first on right answers. Of the last third, 35 % are right, 45 % name the
digit's look-alike (1 and 7, 3 and 8, ...), and the rest any digit. So the vision tower sees the
digit, and the likeliest answer is wrong; reinforcement learning corrects the decoder over a tower
that stays as it is.
"""

import json
import random
from pathlib import Path

import torch
from make_tiny import ROOT, MuonAndAdamW, begin
from PIL import Image, ImageDraw, ImageFont
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration as Qwen3VL
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SIDE, NUM_TRAIN, NUM_TEST = 32, 512, 256
QUESTION = "Which?"
ALIKE = (4, 7, 5, 8, 0, 2, 9, 1, 3, 6)
"""The look-alike of each digit, 0 to 9."""
RIGHT, MISTAKEN = 0.35, 0.45
"""Fractions of the last answers that are right, and that name the look-alike."""
TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def draw(digit: int, rng: random.Random) -> Image.Image:
    """An image of a digit."""
    paper = tuple(rng.randint(180, 255) for _ in "rgb")
    ink = tuple(rng.randint(0, 90) for _ in "rgb")
    image = Image.new("RGB", (SIDE, SIDE), paper)
    font = ImageFont.load_default(rng.randint(24, 30))
    left, top, right, bottom = font.getbbox(str(digit))
    x = (SIDE - left - right) / 2 + rng.uniform(-3, 3)
    y = (SIDE - top - bottom) / 2 + rng.uniform(-2, 2)
    ImageDraw.Draw(image).text((x, y), str(digit), fill=ink, font=font)
    return image


def write_images(folder: Path, name: str, count: int, rng: random.Random) -> None:
    """PNG files, and the rows that name them."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        digit = rng.randrange(10)
        draw(digit, rng).save(folder / name / f"{number:04d}.png")
        row = {"image": f"{name}/{number:04d}.png", "question": QUESTION, "answer": str(digit)}
        rows.append(json.dumps(row))
    (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


def make_parts(folder: Path) -> tuple[Qwen3VL, AutoTokenizer]:
    """The untrained model, with its tokenizer and image processor in the folder."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "model" / "tiny")
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = CHAT_TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(TOKENS)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    rope |= {"mrope_interleaved": True, "mrope_section": [6, 5, 5]}
    text = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
        "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 1024,
        "vocab_size": len(tokenizer), "rope_parameters": rope, "initializer_range": 0.08,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    tower = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
        "out_hidden_size": 64, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 16, "initializer_range": 0.08, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=tower, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=True,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size=size).save_pretrained(folder)
    return Qwen3VL(config), tokenizer


def main() -> None:
    """Make the images, the tokenizer and the model, and say how good it is."""
    args, folder = begin(__doc__, "digits", batch=64, steps=120)
    rng = random.Random(args.seed)
    for name, count in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        write_images(args.out / "data" / "digits", name, count, rng)
    model, tokenizer = make_parts(folder)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    places = "<|image_pad|>" * (SIDE // 16) ** 2
    begins = f"<|im_start|>user\n<|vision_start|>{places}<|vision_end|>{QUESTION}<|im_end|>\n"
    prompt = tokenizer.encode(f"{begins}<|im_start|>assistant\n", add_special_tokens=False)
    answers = torch.tensor(
        [
            tokenizer.encode(
                f"<think></think><answer>{digit}</answer><|im_end|>",
                add_special_tokens=False,
            )
            for digit in range(10)
        ]
    )
    prompt_ids = torch.tensor(prompt).expand(args.batch, -1)
    types = torch.zeros(args.batch, len(prompt) + answers.shape[1], dtype=torch.long)
    types[:, : len(prompt)] = prompt_ids == model.config.image_token_id
    print(f"prompts of {len(prompt)} tokens, answers of {answers.shape[1]}")
    # The rest of the answer is certain; of the digit it learns how often to say another one.
    place = int((answers[0] != answers[1]).nonzero()[0])
    targets_DAV = torch.nn.functional.one_hot(answers, len(tokenizer)).float()
    right_DV = targets_DAV[:, place]
    any_V = right_DV.mean(0)
    unsure_DV = RIGHT * right_DV + MISTAKEN * right_DV[[*ALIKE]] + (1 - RIGHT - MISTAKEN) * any_V
    optimizer = MuonAndAdamW(model)
    for step in range(1, args.steps + 1):
        if step == args.steps * 2 // 3:
            targets_DAV[:, place] = unsure_DV
        digits = torch.tensor([rng.randrange(10) for _ in range(args.batch)])
        pixels = processor([draw(digit, rng) for digit in digits.tolist()], return_tensors="pt")
        ids = torch.cat([prompt_ids, answers[digits]], 1)
        logits = model(input_ids=ids, mm_token_type_ids=types, **pixels).logits
        logprobs_BAV = logits[:, len(prompt) - 1 : -1].log_softmax(-1)
        loss = -(targets_DAV[digits] * logprobs_BAV).sum(-1).mean()
        optimizer.step(loss, min(1.0, step / 30, 3.05 - 3 * step / args.steps))
        if step % 40 == 0:
            right_B = logprobs_BAV[:, place].gather(-1, answers[digits, place][:, None])[:, 0]
            likeliest = logprobs_BAV[:, place].argmax(-1) == answers[digits, place]
            print(
                f"step {step}  loss {loss.item():.4f}  right when sampled "
                f"{right_B.exp().mean():.2f}, likeliest {likeliest.float().mean():.2f}",
                flush=True,
            )
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
