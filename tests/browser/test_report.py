"""The report as a browser shows it: what a model wrote is only shown, and all of it can be reached by keyboard."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait
from tokenizers import Tokenizer

from learner.driver import record
from learner.tools.report.write import LiveServer, Watched, report
from rollout import ledger
from rollout.fakes import make_group
from rollout.types import Completion

MODEL = Path(__file__).parents[2] / "examples" / "tiny-arithmetic"
HTML = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
HOSTILE = HTML + "\x00\u202e א\u200b\u200b\u200b\U000e0041"
SHOWN = HTML + "U+0000U+202E אU+200B, 3 timesU+E0041"
Visit = Callable[[Path | str], Any]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of three groups; problem 5's second completion has no reward."""
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"step": step, "at": 0.0, "reward/mean": step / 4, "policy/entropy": 1 / step} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(
        f"steps: 2\nmodel: {{path: {MODEL}}}\nlearner: {{algorithm: grpo, loss: {{advantage: none}}}}\n"
    )
    for step in (1, 2):
        rewards = [(position / 4, None if position == 5 else 0.0) for position in range(3 * step - 3, 3 * step)]
        groups = [
            make_group(3 * step - 3 + i, rewards=pair, completion=[HOSTILE, "4"]) for i, pair in enumerate(rewards)
        ]
        ledger.write(folder / "rollouts", step, groups)
    return folder


@pytest.fixture
def page(run: Path) -> Path:
    assert report(run, None, None, 2**20) == 0
    return run / "report.html"


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest, chromium: Any) -> Iterator[str]:
    """What the browser's user prefers."""
    chromium.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": request.param}]}
    )
    yield request.param
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def texts(driver: Any, selector: str) -> list[str]:
    """At one moment: a live page may draw its elements anew between two questions."""
    script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)"
    found: list[str] = driver.execute_script(script, selector)
    return found


def press(driver: Any, *keys: str) -> None:
    for key in keys:
        driver.switch_to.active_element.send_keys(key)


def until(driver: Any, what: Callable[[], object]) -> None:
    WebDriverWait(driver, 20, poll_frequency=0.02).until(lambda _: what())


def styles(driver: Any, selector: str, name: str) -> list[str]:
    """Of each element as it is drawn."""
    script = "return [...document.querySelectorAll(arguments[0])].map((one) => getComputedStyle(one)[arguments[1]])"
    found: list[str] = driver.execute_script(script, selector, name)
    return found


def group_title(driver: Any) -> str:
    return " ".join(texts(driver, "#group > h3"))


def test_it_is_used_by_keyboard_alone(page: Path, visit: Visit) -> None:
    driver = visit(page)
    assert len(texts(driver, "#list li")) == 6
    driver.find_element(By.TAG_NAME, "body").send_keys("/")
    assert driver.switch_to.active_element.get_attribute("id") == "problem"
    press(driver, *"train-5")
    assert driver.find_element(By.ID, "count").text == "1 of 6 groups, 2 of 12 completions"
    press(driver, Keys.ESCAPE, Keys.ENTER)
    until(driver, lambda: group_title(driver) == "Step 2, problem train-5")
    heads = ["1. reward 1.25 advantage 0", "2. no reward advantage 0"]
    until(driver, lambda: texts(driver, ".card h4") == heads)  # a card has no text before it is drawn
    assert "a reward function raised; without a number: vowels." in texts(driver, ".card .remark")[0]
    press(driver, "/", *[Keys.BACKSPACE] * len("train-5"), Keys.ESCAPE)
    assert len(texts(driver, "#list li")) == 6
    press(driver, "n", "p")  # there is none after it
    until(driver, lambda: group_title(driver) == "Step 2, problem train-4")
    press(driver, Keys.ESCAPE, Keys.ARROW_UP, Keys.ENTER)
    until(driver, lambda: group_title(driver) == "Step 2, problem train-3")


def test_groups_are_found_by_step_reward_and_failure(page: Path, visit: Visit) -> None:
    driver = visit(page)
    driver.find_element(By.ID, "least").send_keys("0.9")
    assert [text.split()[1] for text in texts(driver, "#list li")] == ["2", "2"]
    driver.find_element(By.ID, "failed").send_keys(Keys.SPACE)
    assert driver.find_element(By.ID, "count").text.startswith("1 of 6 groups,")
    driver.find_element(By.ID, "failed").send_keys(Keys.SPACE)
    driver.find_element(By.ID, "least").clear()
    driver.find_element(By.ID, "least").send_keys(Keys.BACKSPACE)
    driver.find_element(By.ID, "order").send_keys("highest")
    assert texts(driver, "#list li .line")[0].startswith("step 2\n1.25")
    driver.find_element(By.ID, "step").send_keys("1")
    assert texts(driver, "#list li .line")[0].startswith("step 1\n0.25 (0 to 0.5)")
    driver.find_element(By.CSS_SELECTOR, "#list button").click()
    until(driver, lambda: group_title(driver) == "Step 1, problem train-2")
    before, after = driver.find_elements(By.CSS_SELECTOR, ".turn button")
    assert not before.is_enabled()
    after.click()
    until(driver, lambda: group_title(driver) == "Step 1, problem train-1")


def test_what_a_model_wrote_is_shown_and_not_run(page: Path, visit: Visit) -> None:
    driver = visit(page)
    driver.find_element(By.CSS_SELECTOR, "#list button").click()
    until(driver, lambda: texts(driver, ".card pre"))
    shown = driver.execute_script("return document.querySelector('.card pre').textContent")
    assert shown == SHOWN
    assert driver.find_elements(By.CSS_SELECTOR, ".card img, .card script") == []
    assert driver.title == "run"  # the folder's name


def test_tokens_and_curves_are_read_by_keyboard(page: Path, visit: Visit) -> None:
    driver = visit(page)
    driver.find_element(By.CSS_SELECTOR, "#list button").click()
    until(driver, lambda: texts(driver, "#colour"))
    driver.find_element(By.ID, "colour").send_keys("logprob")
    tokens = driver.find_elements(By.CSS_SELECTOR, ".tokens")
    tokens[1].send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "logprob -0.50, probability 0.607, policy version 0." in texts(driver, ".said")[1]
    assert texts(driver, ".said")[1].startswith("Token 2 of 2, id 1, ")
    chart = driver.find_element(By.CSS_SELECTOR, "figure svg")
    chart.send_keys(Keys.HOME)
    assert texts(driver, "figure .legend")[0] == "reward/mean 0.25"
    assert "mean: 0.25 at step 1, 0.5 at step 2" in chart.get_attribute("aria-label")


def test_tokens_are_coloured_by_how_far_the_learner_is_from_the_sampler(run: Path, scheme: str, visit: Visit) -> None:
    group = make_group(0, rewards=[1.0, 0.0, 0.5])
    kept = pa.array([[0.5], [-1e-5, 0.0], None], pa.list_(pa.float16()))  # null: not trained on
    ledger.write(run / "rollouts", 1, [group])
    record.write_mismatch(run, 1, [group], kept)
    report(run, None, None, 2**20)
    driver = visit(run / "report.html")
    driver.find_element(By.CSS_SELECTOR, "#list button").click()
    until(driver, lambda: texts(driver, "#colour"))
    driver.find_element(By.ID, "colour").send_keys("learner")
    blue, orange = {"light": ("20, 110, 200", "214, 104, 20"), "dark": ("70, 150, 240", "240, 130, 50")}[scheme]
    none = "rgba(0, 0, 0, 0)"
    drawn = styles(driver, ".tokens span", "backgroundColor")
    assert drawn == [f"rgba({blue}, 0.52)", f"rgba({orange}, 0.22)", none, none, none, none]
    driver.find_elements(By.CSS_SELECTOR, ".tokens")[1].send_keys(Keys.ARROW_RIGHT)
    assert texts(driver, ".said")[1].endswith("policy version 0, learner minus sampler -1.0e-5 nats.")


def test_characters_of_several_tokens_are_whole(run: Path, visit: Visit) -> None:
    text = "é <answer>שלום 👩</answer>"
    ids = np.asarray(Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids, np.int32)
    made = Completion(ids, np.full(len(ids), -0.5, np.float32), "stop", np.zeros(len(ids), np.int32))
    ledger.write(run / "rollouts", 1, [make_group(0, completions=[made], rewards=[1.0])])
    report(run, None, None, 2**20)
    driver = visit(run / "report.html")
    driver.find_element(By.CSS_SELECTOR, "#list button").click()
    until(driver, lambda: texts(driver, "#colour"))
    driver.find_element(By.ID, "colour").send_keys("logprob")
    until(driver, lambda: texts(driver, ".tokens") == [text])
    assert len(texts(driver, ".tokens span")) == len(ids)
    driver.find_element(By.CSS_SELECTOR, ".tokens").send_keys(Keys.HOME)
    assert f"Token 1 of {len(ids)}, id {ids[0]}, part of the next character: logprob -0.50" in texts(driver, ".said")[0]


def test_what_failed_is_said_in_words_beside_the_completion_and_counted(run: Path, scheme: str, visit: Visit) -> None:
    said = "reward 'tail': error: ValueError: <b>no</b>"
    for step, failed in ((1, [None]), (2, [None, None])):
        group = make_group(step, rewards=[1.0, *failed], reward_error=[None, *[said] * len(failed)])
        ledger.write(run / "rollouts", step, [group])
    report(run, None, None, 2**20)
    driver = visit(run / "report.html")
    assert texts(driver, "#list .failure") == ["1 failed", "2 failed"]
    assert texts(driver, "#errors summary") == ["3 of 5 completions failed"]
    driver.find_element(By.CSS_SELECTOR, "#errors summary").click()
    assert texts(driver, "#errors td") == [said, "3", "1 to 2"]
    driver.find_element(By.CSS_SELECTOR, "#list button").click()
    until(driver, lambda: texts(driver, ".card .remark") == [said])
    warning = {"light": "rgb(255, 243, 214)", "dark": "rgb(58, 47, 18)"}[scheme]
    assert styles(driver, ".card .remark", "backgroundColor") == [warning]


def test_two_runs_whose_rewards_differ_are_not_on_one_scale(run: Path, tmp_path: Path, visit: Visit) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.75}\n')
    (other / "config.yaml").write_text(
        (run / "config.yaml").read_text() + "rewards: [{use: format}]\ndata: {eval: {every: 2}}\n"
    )
    report(run, None, other, 2**20)
    driver = visit(run / "report.html")
    (told,) = texts(driver, "#lines")
    assert told.startswith("Solid: run. Dashed: other. The reward is not on one scale")
    assert "same problems" not in told  # how often is no other problem
    assert texts(driver, "#completions h2") == ["Completions of run"]
    assert texts(driver, "#differences td") == [
        "data.eval.every",
        "—",
        "2",
        "rewards.format",
        "—",
        "use format",
    ]


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ("seed: 0\ndata: {path: 'rg:chain_sum'}", "seed: 1\ndata: {path: 'rg:chain_sum'}", "seeds"),
        ("seed: 0\ndata: {path: a/b, eval: {split: test}}", "seed: 1\ndata: {path: a/b, eval: {split: test}}", None),
        ("seed: 0\nenv: {use: a}", "seed: 1\nenv: {use: b}", "settings of env and seeds"),
        ("env: {concurrency: 1}", "env: {concurrency: 2}", None),
    ],
)
def test_two_runs_with_other_held_out_problems_are_told_apart(
    one: str, other: str, why: str | None, run: Path, visit: Visit
) -> None:
    second = shutil.copytree(run, run.parent / "other")
    for folder, settings in ((run, one), (second, other)):
        with (folder / "config.yaml").open("a") as file:
            file.write(settings + "\n")
    report(run, None, second, 2**20)
    said = f" Held-out accuracy is not of the same problems, since {why} differ." if why else ""
    assert texts(visit(run / "report.html"), "#lines") == [f"Solid: run. Dashed: other.{said}"]


def test_noisy_curves_have_a_mean_and_those_that_do_not_change_are_folded(run: Path, visit: Visit) -> None:
    def rows(staleness: float) -> str:
        """Of 40 steps: the reward goes 0, 1, 0, 1, ...; the accuracy and the staleness stay."""
        steps = ({"step": i, "at": float(i), "reward/mean": float(i % 2), "policy/entropy": 2.0,
                  "policy/staleness_mean": staleness, "eval/accuracy": 0.5, "loss/grad_norm": i / 40}
                 for i in range(1, 41))  # fmt: skip
        return "".join(json.dumps(row) + "\n" for row in steps)

    second = shutil.copytree(run, run.parent / "other")
    (run / "metrics.jsonl").write_text(rows(1.0))
    report(run, None, None, 2**20)
    driver = visit(run / "report.html")
    assert texts(driver, "#unchanged-names") == ["2 that do not change: Entropy, Staleness"]
    assert "Reward" in texts(driver, "#figures h3")
    assert "Held-out" in texts(driver, "#figures h3")
    places = driver.execute_script(
        "const of = (figure, kind) => figure.querySelector('polyline' + kind).getAttribute('points').split(' ')"
        ".map((point) => Number(point.split(',')[1]));"
        "const figures = [...document.querySelectorAll('#figures figure')];"
        "const figure = figures.find((one) => one.innerText.includes('Reward'));"
        "return [of(figure, '.faint'), of(figure, ':not(.faint)')]"
    )
    raw, mean = ([*map(float, some)][5:-5] for some in places)
    assert max(raw) - min(raw) == pytest.approx(5 * (max(mean) - min(mean)))  # of five steps two or three are 1
    (second / "metrics.jsonl").write_text(rows(0.0))
    report(run, None, second, 2**20)
    assert texts(visit(run / "report.html"), "#unchanged-names") == ["1 that do not change: Entropy"]


def test_where_the_time_of_each_start_went_is_drawn(run: Path, scheme: str, visit: Visit) -> None:
    starts = [{"at": 0.0, "wall": 8.0, "processes": 6.0, "training": 2.0}, {"at": 600.0, "wall": 4.0, "processes": 4.0}]
    (run / "phases.jsonl").write_text("".join(json.dumps(one) + "\n" for one in starts) + '{"at": 601.0, "wa')
    report(run, None, None, 2**20)
    driver = visit(run / "report.html")
    assert texts(driver, ".start") == ["steps 1 to 2\n8.0 s", "no step\n4.0 s"]
    assert texts(driver, "#time .legend li") == ["processes 10.0 s 83 %", "training 2.0 s 17 %"]
    grey, red = {"light": ("77, 106, 124", "200, 80, 30"), "dark": ("159, 184, 200", "242, 145, 94")}[scheme]
    colours = [f"rgb({one})" for one in (grey, red, grey)]
    assert styles(driver, ".start rect", "fill") == colours
    assert styles(driver, "#time .legend i", "backgroundColor") == colours[:2]
    script = "return [...document.querySelectorAll('.start rect')].map((one) => one.getBoundingClientRect().width)"
    first, second, third = driver.execute_script(script)
    assert (first / second, first / third) == pytest.approx((3, 1.5), rel=0.01)


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(width: int, page: Path, visit: Visit) -> None:
    driver = visit(page)
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": True}
    )
    driver.find_element(By.CSS_SELECTOR, "#list button").click()
    until(driver, lambda: texts(driver, ".card"))
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_run_is_followed(run: Path, visit: Visit) -> None:
    with LiveServer(Watched(run, None, 2**20)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            driver = visit(server.address)
            assert len(texts(driver, "#list li")) == 6
            driver.find_element(By.ID, "metric").send_keys("policy")
            driver.find_elements(By.CSS_SELECTOR, "#list button")[2].send_keys("")  # has the keyboard
            ledger.write(run / "rollouts", 3, [make_group(9)])
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 3, "reward/mean": 1.0, "a/new": 1}\n')
            until(driver, lambda: len(texts(driver, "#list li")) == 7)
            assert texts(driver, ".tile strong")[0] == "3"
            assert texts(driver, "#other h3") == ["policy/entropy"]
            assert driver.switch_to.active_element.get_attribute("data-group") == "2"
            assert not driver.find_element(By.ID, "time").is_displayed()
            (run / "phases.jsonl").write_text('{"at": 0.0, "wall": 4.0, "processes": 4.0}\n')  # the run ends
            until(driver, lambda: texts(driver, ".start") == ["steps 1 to 2\n4.0 s"])
            driver.get("about:blank")
        finally:
            server.shutdown()
            thread.join()
