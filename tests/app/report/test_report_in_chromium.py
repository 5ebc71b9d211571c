"""The page in a real browser, Debian's Chromium: that it is quick, shows what it should, loads
nothing, and that no completion acts."""

import gzip
import threading
from pathlib import Path

import orjson

from chromium import IN_A_BROWSER, Chromium, opened, text_of
from reason_llm.app.report.page import write_report
from reason_llm.app.report.serve import make_server
from reason_llm.run.store import metrics
from report_runs import group, record, write_run

pytestmark = IN_A_BROWSER

HOSTILE = [
    "<script>document.title='taken'</script>",
    "<img src=x onerror=\"document.title='taken'\"><svg onload=\"document.title='taken'\">",
    "</script><script>document.title='taken'</script><!--",
    "\x1b[31mred\x1b[0m\x07 \x9b31m \x1b]0;taken\x07 bell\x00end",
    "right \u202eto\u202c left \u2066isolate\u2069 \u200bzero\ufeff \u2028line",
    "javascript:alert(1) {{script}} &lt;b&gt; &#x3c;",
]


def honest(tmp_path: Path, count: int = 12, groups: int = 4) -> Path:
    """Steps whose reward and accuracy rise; in each group one completion is right."""
    records = [record(0, **{"eval/accuracy": 0.2})]
    for step in range(1, count + 1):
        reward = 0.2 + 0.6 * step / count
        values = {"score/reward": reward, "score/boxed": reward, "eval/accuracy": reward}
        records.append(record(step, **values))
    steps = [
        [
            group(
                [f"1+{s}=2 so {g}", f"1+{s}=3 so {g}", "no"], [0.0, 1.0, 0.0], f"What is {g} + {s}?"
            )
            for g in range(groups)
        ]
        for s in range(count)
    ]
    return write_run(tmp_path / "run", records, steps)


def test_the_overview_draws_its_charts_and_tells_their_values(
    page: Chromium, tmp_path: Path
) -> None:
    opened(page, honest(tmp_path))
    assert text_of(page, "h1") == "run"
    for key in (
        "score/reward",
        "eval/accuracy",
        "sample/completion_tokens",
        "train/entropy",
        "train/clip_fraction",
        "sample/truncated_fraction",
        "train/sampler_mismatch_max",
        "time",
        "memory/sampling",
        "memory/learning",
    ):
        selector = f"document.getElementById('chart-{key}')"
        page.wait(f"{selector}.querySelectorAll('path, rect').length > 0")
    assert "No alarms" in text_of(page, "main")
    # Pointing at the middle of one chart tells the values of all at that step.
    x, y = page.run(
        "(() => { const b = document.getElementById('chart-score/reward').querySelector('svg')"
        ".getBoundingClientRect(); return [b.right - 9, b.y + b.height / 2]; })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.wait("document.getElementById('chart-score/reward').textContent.includes('step 12')")
    assert "step 12 0.8" in text_of(page, "[id='chart-score/reward'] .value")
    assert "step 12 80.0%" in text_of(page, "[id='chart-eval/accuracy'] .value")
    assert page.complaints == []
    assert all(url.startswith(("file:", "about:")) for url in page.requests)


def test_runs_are_laid_over_one_another_and_one_can_be_hidden(
    page: Chromium, tmp_path: Path
) -> None:
    """The seventh run has the first one's colour, and a broken line."""
    folders = [honest(tmp_path / str(n), count=n + 3, groups=1) for n in range(7)]
    out = tmp_path / "report.html"
    write_report(folders, out)
    lines = (
        "[...document.querySelectorAll(\"[id='chart-score/reward'] svg > path\")]"
        ".map(each => [each.style.stroke, each.style.strokeDasharray !== ''])"
    )
    for theme, width in (("dark", 390), ("light", 1280)):
        page.theme(theme)
        page.resize(width)
        page.open(out)
        page.wait(f"{lines}.length === 7")
        assert page.run("document.documentElement.scrollWidth") <= width
    colors = [f"var(--run-{n % 6})" for n in range(7)]
    assert page.run(lines) == [[color, n == 6] for n, color in enumerate(colors)]
    assert text_of(page, "h1") == "7 runs"
    page.click("table.compare input")
    page.wait(f"{lines}.length === 6")
    assert page.complaints == []


def test_an_alarm_leads_to_its_curves_and_rollouts(page: Chromium, tmp_path: Path) -> None:
    folder = honest(tmp_path)
    records = metrics.read(folder)
    records[7]["train/kl"] = 3.0
    (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in records))
    opened(page, folder)
    assert "KL or mismatch jumps" in text_of(page, ".alarm h3")
    page.click(".alarm .links a:first-child")
    page.wait("document.querySelector('.chart.shown .band')")
    assert page.run("document.querySelector('.chart.shown').id") == "chart-train/kl"
    page.click(".alarm .links a:last-child")
    page.wait("document.querySelectorAll('.list .item').length === 4")
    assert page.run(
        "[...document.querySelectorAll('.item .under')].every(e =>"
        "e.textContent.startsWith('step 7'))"
    )
    page.wait("document.querySelectorAll('.card').length === 3")


def test_rollouts_are_filtered_searched_and_compared(page: Chromium, tmp_path: Path) -> None:
    opened(page, honest(tmp_path), "view=rollouts")
    page.wait("document.querySelectorAll('.list .item').length === 40")
    assert "48 groups, 144 rollouts" in text_of(page, ".list .count")
    page.run(
        "(() => { const s = document.querySelector('.filters select'); s.value = '3';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert "4 groups" in text_of(page, ".list .count")
    page.run(
        "(() => { const s = document.querySelectorAll('.filters select')[1];"
        "s.value = 'right';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert "0 groups" in text_of(page, ".list .count")
    for place in (0, 1):
        page.run(
            f"(() => {{ const s = document.querySelectorAll('.filters select')[{place}];"
            "s.value = ''; s.dispatchEvent(new Event('change')); })()"
        )
    page.run(
        "(() => { const i = [...document.querySelectorAll('.filters input')].at(-1);"
        "i.value = '1+7=3 SO 2'; i.dispatchEvent(new Event('change')); })()"
    )
    page.wait("document.querySelectorAll('.list .item').length === 1")
    assert page.run("document.querySelectorAll('.cell.found').length") == 1
    page.click(".list .item")
    page.wait("document.querySelectorAll('.card').length === 3")
    page.wait("document.querySelector('.card mark')")
    page.click(".modes .button:nth-child(2)")
    page.wait("document.querySelectorAll('.card .t').length > 20")
    assert page.run("document.querySelectorAll('.card:first-child .t.p1').length") > 5  # exp(-0.5)
    page.click(".modes .button:nth-child(3)")
    page.wait("document.querySelector('.card ins')")
    # Beside the right one, the reference: 2 in the place of 3.
    assert text_of(page, ".card:nth-child(1) del") == "3"
    assert text_of(page, ".card:nth-child(1) ins") == "2"
    assert page.complaints == []


def test_a_hostile_rollout_changes_nothing(page: Chromium, tmp_path: Path) -> None:
    prompt = "<script>document.title='taken'</script>\x1b[2J\u202e"
    groups = [[group(HOSTILE, [1.0] * len(HOSTILE), prompt), group(["1"] * 2, [0.0, 1.0])]]
    records = [record(0), record(1, **{"score/<img src=x onerror=alert(1)>": 1.0})]
    folder = write_run(tmp_path / "<img src=x onerror=alert(1)>", records, groups)
    opened(page, folder, "view=rollouts&group=0")
    title = page.run("document.title")
    page.wait(f"document.querySelectorAll('.card').length === {len(HOSTILE)}")
    for mode in ("1", "3"):  # as text, and as a difference
        page.click(f".modes .button:nth-child({mode})")
        bodies = page.run(
            "[...document.querySelectorAll('.card .text-block')].map(e => e.textContent)"
        )
        assert page.run("document.querySelectorAll('main script, main img, main svg').length") == 0
        assert not any(
            odd in body
            for body in bodies
            for odd in "\x00\x07\x1b\x9b\u200b\u202e\u2066\u2028\ufeff"
        )
    page.click(".modes .button:nth-child(1)")
    bodies = page.run("[...document.querySelectorAll('.card .text-block')].map(e => e.textContent)")
    assert bodies[:3] == HOSTILE[:3]
    assert bodies[3].startswith("\u241b[31mred\u241b[0m\u2407 U+009B31m")
    assert bodies[4].startswith("right U+202Eto")
    assert bodies[5] == HOSTILE[5]
    assert "\u241b[2JU+202E" in text_of(page, ".prompt")
    for view in ("overview", "setup"):
        page.run(f"location.hash = 'view={view}'")
        page.wait(f"document.getElementById('main').dataset.view === '{view}'")
        assert page.run("document.querySelectorAll('main img').length") == 0
    assert page.run("document.title") == title
    assert page.complaints == []
    assert all(url.startswith(("file:", "about:")) for url in page.requests)


def test_the_policy_stops_a_script_that_gets_past_the_first_wall(
    page: Chromium, tmp_path: Path
) -> None:
    opened(page, honest(tmp_path))
    page.run(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.taken = 1';"
        "document.body.append(s);"
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.taken = 1\">');"
        "})()"
    )
    assert page.run("fetch('https://example.org').then(() => 'got', () => 'refused')") == "refused"
    assert page.run("typeof window.taken") == "undefined"
    assert any("Content Security Policy" in text for text in page.complaints)
    assert not any(url.startswith("http") for url in page.requests)


def test_a_megabyte_of_one_token_opens_at_once(page: Chromium, tmp_path: Path) -> None:
    text, count = "1" * 2**20, 2**20
    long = {"token_ids": (9,) * count, "logprobs": (-0.1,) * count, "finish_reason": "length"}
    folder = write_run(
        tmp_path / "run", [record(0), record(1)], [[group([text, text], [0.0, 1.0], **long)]]
    )
    opened(page, folder, "view=rollouts")
    page.wait("document.querySelectorAll('.card').length === 2")
    assert page.run("document.querySelector('.card .text-block').textContent.length") < 21_000
    assert "1,028,576 characters" in text_of(page, ".card button")
    page.click(".modes .button:nth-child(3)")
    assert "Too long" in text_of(page, ".card:nth-child(1) .text-block")
    assert (folder / "report.html").stat().st_size < 2**20
    assert page.complaints == []


def test_ten_thousand_rollouts_open_within_two_seconds(page: Chromium, tmp_path: Path) -> None:
    """50 steps of 25 groups of 8, each completion of about 150 tokens of its own."""
    steps = [
        [
            group([f"{s} and {g}: " + " ".join(str((s * g + i * c) % 997) for i in range(40))
                   for c in range(8)], [float(c % 2) for c in range(8)], f"What is {g}?")
            for g in range(25)
        ]
        for s in range(50)
    ]  # fmt: skip
    folder = write_run(tmp_path / "run", [record(s) for s in range(51)], steps)
    opened(page, folder)
    shown = "performance.getEntriesByName('shown')[0].startTime"
    tries = (page.open(folder / "report.html") for _ in range(20))  # while others use the machine
    assert page.run(shown) < 2000 or any(page.run(shown) < 2000 for _ in tries)
    size = (folder / "report.html").stat().st_size
    assert size < 30 * 2**20, size
    page.run("location.hash = 'view=rollouts'")
    page.wait("document.querySelector('.card')")
    assert "10,000 rollouts of 50 steps" in text_of(page, ".head p")
    assert "sample" not in text_of(page, ".head p")


def test_a_served_page_follows_the_run(page: Chromium, tmp_path: Path) -> None:
    folder = honest(tmp_path)
    answer = {"set": "held_out", "id": "1", "prompt": "Q", "completion": "A", "score": 1.0}
    (folder / "evaluations").mkdir()
    place = folder / "evaluations" / "step-00000012.jsonl.gz"
    place.write_bytes(gzip.compress(orjson.dumps(answer)))
    with make_server([folder], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            page.open(server.url)
            assert "at step 12 of 100" in text_of(page, ".head p")
            with (folder / "metrics.jsonl").open("ab") as file:
                file.write(orjson.dumps(record(13)) + b"\n")
            page.wait("document.querySelector('.head p').textContent.includes('at step 13')")
            page.run("location.hash = 'view=rollouts'")
            page.wait("document.querySelectorAll('.card').length === 3")
            assert text_of(page, "#live") == "following the run"
            page.run("location.hash = 'view=held_out'")
            page.wait("document.querySelectorAll('.card').length === 1")
            assert text_of(page, ".card b") == "after step 12"
        finally:
            server.shutdown()
            thread.join()
    page.wait("document.querySelector('#live').textContent === 'the server is gone'")
