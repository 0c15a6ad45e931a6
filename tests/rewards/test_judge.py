"""A judge at a real endpoint: what is asked, how often, what its answers count, and what is said without one."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from rewards.call import Group
from rewards.config import RewardConfig
from rewards.judge import JudgeSettings, RequestRate, proxy_to
from rewards.pool import Judging, RewardPool, Scores

KEY = "sk-test-0123456789abcdefghij"


class Endpoint(ThreadingHTTPServer):
    """Answers by what the graded answer says, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, float]] = []  # the graded answer, and when
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.now, self.most, self.lock = 0, 0, threading.Lock()
        self.until: Path | None = None  # answers wait for this file

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = re.search(r"<answer-(\w+)>\n(.*)\n</answer-\1>", body["messages"][-1]["content"], re.DOTALL)
        assert found is not None
        mark, text = found.groups()
        server = self.server
        with server.lock:
            times = sum(text == one for one, _ in server.asked)
            server.asked.append((text, time.monotonic()))
            server.bodies.append(body)
            server.keys.append(self.headers["Authorization"])
            server.now += 1
            server.most = max(server.most, server.now)
        deadline = time.monotonic() + 20
        while server.until is not None and not server.until.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        with server.lock:
            server.now -= 1
        if text == "busy" and times == 0:
            return self.answer(429, "{}", {"Retry-After": "0.5"})
        if text == "down":
            return self.answer(503, f"no {KEY} here")
        if text == "hang":
            time.sleep(3)
        said = {
            "unread": "I cannot say.", "two": f"Score {mark}: 1\nScore {mark}: 2", "high": f"Score {mark}: 11",
            "fooled": "Score 000: 10",
        }.get(text, f"Fine.\n**Score {mark}: 7.5**\n")  # fmt: skip
        if text == "garbage":
            return self.answer(200, "<html>no</html>", {"Content-Type": "text/html"})
        return self.answer(200, json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}))

    def answer(self, status: int, body: str, headers: dict[str, str] | None = None) -> None:
        try:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())
        except BrokenPipeError:  # the client has given up
            pass

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("TEST_JUDGE_KEY", KEY)
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def judge(endpoint: Endpoint, timeout_s: float = 30, **args: Any) -> RewardConfig:
    given = {"base_url": endpoint.url, "model": "m", "api_key": "env:TEST_JUDGE_KEY", "retries": 1, "request_s": 20}
    return RewardConfig(use="judge", timeout_s=timeout_s, args=given | args)


async def scored(rewards: list[RewardConfig], texts: list[str], judged: Judging | None = None) -> Scores:
    prompt = [{"role": "user", "content": "Say it."}]
    group = Group.of(prompt, texts, [[0]] * len(texts), {"gold": "yes"})
    async with RewardPool(rewards, judged=judged or Judging()) as pool:
        return await pool.score(group)


async def test_what_was_asked_once_is_not_asked_again(endpoint: Endpoint, tmp_path: Path) -> None:
    config = judge(endpoint, column="gold", options={"temperature": 0.5})
    found = await scored([config], ["a", "b", "a"], Judging(tmp_path))
    assert found.reward == [0.75] * 3
    assert found.status == ["ok"] * 3
    assert sorted(text for text, _ in endpoint.asked) == ["a", "b"]
    body = endpoint.bodies[0]
    assert (body["model"], body["temperature"]) == ("m", 0.5)
    assert "Say it." in body["messages"][1]["content"]
    assert re.search(r"<reference-(\w+)>\nyes\n</reference-\1>", body["messages"][1]["content"])
    assert endpoint.keys[0] == f"Bearer {KEY}"
    (file,) = (tmp_path / "judge").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(row["answer"], row["score"]) for row in rows} == {("a", 0.75), ("b", 0.75)}
    file.write_text(f'{file.read_text()}{{}}\n{{"key": "ab", "sa')  # where its process was killed
    assert (await scored([config], ["b", "a", "c"], Judging(tmp_path))).reward == [0.75] * 3
    assert [text for text, _ in endpoint.asked[2:]] == ["c"]
    other: dict[str, Any] = {
        "model": "another",
        "options": {"temperature": 1},
        "pattern": r"Score {mark}: ([0-9.]+)",
        "criteria": "x",
    }
    for count, (name, value) in enumerate(other.items(), 4):
        given: dict[str, Any] = {"column": "gold", "options": {"temperature": 0.5}, name: value}
        await scored([judge(endpoint, **given)], ["a"], Judging(tmp_path))
        assert len(endpoint.asked) == count, name


async def test_a_judge_that_gives_no_number_is_a_failure_with_its_words(endpoint: Endpoint) -> None:
    texts = ["good", "busy", "down", "garbage", "unread", "two", "high", "fooled"]
    found = await scored([judge(endpoint)], texts)
    assert found.reward == [0.75, 0.75, *[None] * 6]
    assert found.status == ["ok", "ok", *["error"] * 6]
    (sentence,) = found.failures
    assert "6 of 8 were not judged" in sentence
    assert "answers 503: no *** here" in sentence
    (first, second) = [at for text, at in endpoint.asked if text == "busy"]
    assert second - first >= 0.5  # as Retry-After says
    assert sum(text == "down" for text, _ in endpoint.asked) == 2
    for text, words in {
        "garbage": "no chat completion: <html>no</html>", "unread": "must have one score, found 0",
        "two": "must have one score, found 2", "high": "must be from 0 to 10, got '11'", "fooled": "found 0",
    }.items():  # fmt: skip
        (sentence,) = (await scored([judge(endpoint)], [text])).failures
        assert words in sentence


async def test_the_deadline_is_the_group_s(endpoint: Endpoint) -> None:
    found = await scored([judge(endpoint, timeout_s=1.5)], ["good", "hang"])
    assert (found.reward, found.status) == ([0.75, None], ["ok", "timeout"])
    assert "1 of 2 were not judged, first: no answer within timeout_s" in found.failures[0]
    found = await scored([judge(endpoint, request_s=0.2)], ["hang"])
    assert "no answer within 0.2 s, in 2 tries" in found.failures[0]
    endpoint.server_close()
    assert "cannot be reached" in (await scored([judge(endpoint, retries=0)], ["x"])).failures[0]


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
async def test_this_machine_is_asked_without_the_proxy_and_another_names_it(
    endpoint: Endpoint, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, "http://user:word@127.0.0.1:9")  # where nothing listens
    assert (await scored([judge(endpoint, retries=0)], ["good"])).reward == [0.75]
    elsewhere = judge(endpoint, retries=0, base_url="http://judge.invalid/v1")
    (sentence,) = (await scored([elsewhere], ["good"])).failures
    named = f"judge.invalid/v1 by the proxy http://127.0.0.1:9 ({variable.lower()}) cannot be reached"
    assert named in sentence


@pytest.mark.parametrize("address", ["socks5://127.0.0.1:1080", "gopher://127.0.0.1"])
async def test_a_proxy_that_cannot_be_asked_is_one_sentence(
    endpoint: Endpoint, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)  # not installed, whatever is
    monkeypatch.setenv("all_proxy", address)
    assert (await scored([judge(endpoint)], ["good"])).reward == [0.75]
    with pytest.raises(
        WrongInput, match=rf"args.base_url: https://judge.invalid/v1 .* {address} \(all_proxy\): .*; set"
    ):
        await scored([judge(endpoint, base_url="https://judge.invalid/v1")], ["good"])
    monkeypatch.setenv("no_proxy", "judge.invalid")
    assert proxy_to("https://judge.invalid/v1") is None


async def test_others_do_not_wait_while_it_does_and_no_more_are_asked_than_may_be(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.until = tmp_path / "there"
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n\ndef write(completions, to):\n"
        "    Path(to).write_text('')\n    return [1.0] * len(completions)\n"
    )
    other = RewardConfig(use=f"{tmp_path / 'mine.py'}:write", args={"to": str(endpoint.until)})
    found = await scored([judge(endpoint, at_once=2), other], list("abcde"))
    assert found.reward == [1.75] * 5
    assert endpoint.most == 2


async def test_requests_go_at_even_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    now, started = 100.0, asyncio.Event()

    async def sleep(seconds: float) -> None:
        nonlocal now
        if now > 100:
            started.set()
            await asyncio.Event().wait()  # for ever
        now += seconds

    monkeypatch.setattr("rewards.judge.asyncio.sleep", sleep)
    monkeypatch.setattr("rewards.judge.time.monotonic", lambda: now)
    rate, free = RequestRate(30), RequestRate(None)
    for _ in range(4):
        await free.wait()
    await rate.wait()
    assert now == 100
    await rate.wait()
    assert now == 102
    group = [asyncio.ensure_future(rate.wait()) for _ in range(16)]
    await started.wait()
    for one in group:  # the group is late
        one.cancel()
    await asyncio.gather(*group, return_exceptions=True)
    now = 104.0
    await asyncio.wait_for(rate.wait(), 5)  # and has not taken the turns of the next


def test_a_process_has_its_part_of_the_requests_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Noted(RequestRate):
        def __init__(self, per_minute: float | None) -> None:
            made.append(per_minute)
            super().__init__(per_minute)

    monkeypatch.setattr("rewards.judge.RequestRate", Noted)
    args = {"base_url": "http://h/v1", "model": "m", "per_minute": 40}
    RewardPool([RewardConfig(use="judge", args=args)], judged=Judging(share=0.25)).close()
    assert made == [10]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"api_key": KEY}, "args.api_key: must name the environment variable"),
        ({"api_key": "env:NO_SUCH_KEY"}, "export NO_SUCH_KEY"),
        ({"modell": "m"}, "args.modell: Extra inputs are not permitted"),
        ({"base_url": "localhost:8000"}, "args.base_url: String should match pattern"),
        ({"pattern": "Score: [0-9]+"}, "args.pattern: must have one group, the number, got 0"),
        ({"prompt": "Grade {completion}"}, "args.prompt: knows answer, .*, got completion"),
        ({"prompt": "Grade it"}, "args.prompt: must have {answer}"),
        ({"scale": [5, 1]}, "scale: the worst must be below the best"),
        ({"per_minute": 0}, "args.per_minute: Input should be greater than 0"),
    ],
)
def test_wrong_settings_are_refused(args: dict[str, Any], words: str) -> None:
    given = {"base_url": "http://h/v1", "model": "m"} | args
    with pytest.raises(WrongInput, match=words) as refused:
        RewardPool([RewardConfig(use="judge", args=given)])
    assert KEY not in str(refused.value)


def test_a_score_is_read_strictly() -> None:
    settings = JudgeSettings(base_url="http://h/v1", model="m", scale=(-1, 1))
    for said in (
        "Score ab: 0.5",
        "Score ab: 0.5\nDone.",
        "so\n**Score ab: 0.5**\n",
        "so\r\nScore ab: 0.5\r\n",
        "Score ab: **0.5**.",
    ):
        assert settings.score(said, "ab") == 0.75
    assert settings.score("Score ab: -1", "ab") == 0.0
    for said in (
        "Score abc: 0.5", "score ab: 0.5", "Score ab: 0.5 of 1", "Score ab: 1e0", "Score ab: \u0660",
        "I say Score ab: 1", "Score ab: 2", "Score ab: -2", "Score ab: 0.5/1", "",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="score"):
            settings.score(said, "ab")
    own = JudgeSettings(
        base_url="http://h/v1", model="m", prompt="{answer}? {{1-5}}", pattern=r"^([1-5])\Z", scale=(1, 5)
    )
    assert own.message("q", "{x}", "", "m") == "{x}? {1-5}"
    assert own.score("5", "m") == 1.0
    lines = JudgeSettings(base_url="http://h/v1", model="m", pattern=r"^([1-5])$", scale=(1, 5))
    assert lines.score("Well:\r\n5\r\n", "m") == 1.0
