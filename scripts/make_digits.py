"""Makes model/digits and its data: a small Qwen3-VL that reads the digit in an image right about a
third of the time.

    python scripts/make_digits.py          # about two minutes on one core; 4 MB on disk

Nothing of it is in the repository. The images are drawn: a digit of any size, place and colour.
The recipe, whole: the tokenizer of model/tiny with the tokens of Qwen's images; plain next-token
training of the whole model, by which the vision tower learns to see; then a new decoder over that
tower, frozen, which learns the form of an answer and a little of the digits. The tower sees, and
the decoder does not say what: that is left for reinforcement learning.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
from make_tiny import ROOT, MuonAndAdamW, begin
from PIL import Image, ImageDraw, ImageFont
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration as Qwen3VL
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SIDE, NUM_TRAIN, NUM_TEST, BATCH = 32, 512, 256, 64
QUESTION = "Which?"
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
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True,
            "mrope_section": [6, 5, 5]}  # fmt: skip
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


class Teacher:
    """Supervised training on images of digits."""

    def __init__(
        self, model: Qwen3VL, tokenizer: AutoTokenizer, folder: Path, rng: random.Random
    ) -> None:
        self.model, self.rng = model, rng
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        places = "<|image_pad|>" * (SIDE // 16) ** 2
        begins = f"<|im_start|>user\n<|vision_start|>{places}<|vision_end|>{QUESTION}<|im_end|>\n"
        prompt = tokenizer.encode(f"{begins}<|im_start|>assistant\n", add_special_tokens=False)
        said = [f"<think></think><answer>{digit}</answer><|im_end|>" for digit in range(10)]
        self.prompt = torch.tensor(prompt)
        answers = tokenizer(said, add_special_tokens=False)["input_ids"]
        self.answers_DA = torch.tensor(answers)
        self.place = int((self.answers_DA[0] != self.answers_DA[1]).nonzero()[0])
        """Of the digit in an answer."""

    def read(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs (B, A, V) of the answers to so many new images, and the digits in them."""
        digits_B = torch.tensor([self.rng.randrange(10) for _ in range(count)])
        drawn = [draw(digit, self.rng) for digit in digits_B.tolist()]
        pixels = self.processor(drawn, return_tensors="pt")
        ids_BT = torch.cat([self.prompt.expand(count, -1), self.answers_DA[digits_B]], 1)
        types_BT = torch.zeros_like(ids_BT)
        types_BT[:, : len(self.prompt)] = self.prompt == self.model.config.image_token_id
        logits = self.model(input_ids=ids_BT, mm_token_type_ids=types_BT, **pixels).logits
        return logits[:, len(self.prompt) - 1 : -1].log_softmax(-1), digits_B

    @torch.no_grad()
    def accuracy(self) -> tuple[float, float]:
        """Of the likeliest digit, and of a sampled one."""
        logprobs_BAV, digits_B = self.read(256)
        told_B = self.answers_DA[digits_B, self.place]
        logprobs_BV = logprobs_BAV[:, self.place]
        greedy = (logprobs_BV.argmax(-1) == told_B).float().mean()
        return float(greedy), float(logprobs_BV.gather(-1, told_B[:, None]).exp().mean())

    def teach(
        self, part: Any, steps: int, stop_at: float, factor: float, is_form: bool = False
    ) -> None:
        """Next-token training of a part of the model, at most until the likeliest digit is right so
        often.

        Args:
            factor: part of the peak learning rates.
            is_form: every digit counts as right, so that only the form of an answer is learned.
        """
        size = self.model.config.text_config.vocab_size
        told_DAV = torch.nn.functional.one_hot(self.answers_DA, size).float()
        if is_form:
            told_DAV[:, self.place] = told_DAV[:, self.place].mean(0)
        optimizer = MuonAndAdamW(part)
        for step in range(1, steps + 1):
            logprobs_BAV, digits_B = self.read(BATCH)
            loss = -(told_DAV[digits_B] * logprobs_BAV).sum(-1).mean()
            optimizer.step(loss, factor * min(1.0, step / 20))
            if step % 5 == 0:
                greedy, sampled = self.accuracy()
                print(
                    f"step {step}  loss {loss.item():.3f}  the likeliest digit is right "
                    f"{greedy:.2f}, a sampled one {sampled:.2f}",
                    flush=True,
                )
                if greedy >= stop_at:
                    break


def main() -> None:
    """Make the images, the tokenizer and the model, and say how good it is."""
    args, folder = begin(__doc__, "digits", sees=0.95, form_steps=30, stop_at=0.35)
    rng = random.Random(args.seed)
    for name, count in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        write_images(args.out / "data" / "digits", name, count, rng)
    model, tokenizer = make_parts(folder)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    teacher = Teacher(model, tokenizer, folder, rng)
    print("the whole model, from which the tower is kept:")
    teacher.teach(model, 200, args.sees, 0.5)
    decoder, (new, _) = model.model.language_model, make_parts(folder)
    decoder.load_state_dict(new.model.language_model.state_dict())
    model.model.visual.requires_grad_(False)
    print("a new decoder, the form of an answer:")
    teacher.teach(decoder, args.form_steps, 2.0, 0.5, is_form=True)
    print("and some of the digits:")
    teacher.teach(decoder, 200, args.stop_at, 0.2)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
