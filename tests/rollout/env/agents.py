"""Agents as somebody else writes them: they know of nothing here but the clients of OpenAI and Anthropic.

    python agents.py KIND [WORD ...]

Each function is called with a problem and returns its reward. As a program the file calls the one that is named KIND
with the problem of the file GLEANER_PROBLEM, and writes the reward to GLEANER_REWARD.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import anthropic
import openai
from openai import OpenAI

SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL: Any = {"type": "function", "function": {"name": "calculator", "parameters": SCHEMA}}
TOOL_A: Any = {"name": "calculator", "input_schema": SCHEMA}
Problem = dict[str, Any]
Scores = dict[str, float]


def computed(expression: str) -> str:
    left, _, right = expression.partition("*")
    try:
        return str(int(left) * int(right))
    except ValueError:
        return "not a product"


def asked(client: OpenAI, messages: list[Any], **how: Any) -> Any:
    return client.chat.completions.create(model="any", messages=messages, tools=[TOOL], **how).choices[0].message


def asked_for_a_stream(client: OpenAI, messages: list[Any]) -> Any:
    with client.chat.completions.stream(
        model="any", messages=messages, tools=[TOOL], stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        whole = stream.get_final_completion()
    assert whole.usage is not None
    assert whole.usage.prompt_tokens > 0
    return whole.choices[0].message


def solve(
    problem: Problem,
    ask: Callable[[OpenAI, list[Any]], Any] = asked,
    change: Callable[[list[Any]], list[Any]] | None = None,
) -> Scores:
    """Answers calls until there is none. change: what becomes of the history after each answer."""
    client, messages, said = OpenAI(), problem["messages"], ""
    for _ in range(3):
        message = ask(client, messages)
        messages.append(message.model_dump(exclude_none=True))
        said = message.content or ""
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = computed(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        messages = change(messages) if change else messages
    return {"right": float(problem["columns"]["answer"] in said)}


def plain(problem: Problem) -> Scores:
    return solve(problem)


async def blocks(problem: Problem) -> float:
    """Asynchronous, and blocks its loop all the same; its reward is a number alone."""
    return solve(problem)["right"]


def streams(problem: Problem) -> Scores:
    return solve(problem, asked_for_a_stream)


def compacts(problem: Problem) -> Scores:
    """Goes on from the question and what it was answered last, in a message of its own."""
    return solve(problem, change=lambda messages: [messages[0], {"role": "user", "content": messages[-1]["content"]}])


def touches(problem: Problem) -> Scores:
    """Sends the same history as another library would: other ids, spaces around texts, arguments written anew."""

    def touched(messages: list[Any]) -> list[Any]:
        for message in messages:
            if message["role"] == "assistant":
                message["content"] = f" {message.get('content') or ''}\n"
                for call in message["tool_calls"]:
                    call["id"] = "own-1"
                    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
            elif message["role"] == "tool":
                message["tool_call_id"] = "own-1"
        return messages

    return solve(problem, change=touched)


def claude(problem: Problem, *, stream: bool = False) -> Scores:
    client, messages, said = anthropic.Anthropic(), problem["messages"], ""
    for _ in range(3):
        how: Any = {"model": "any", "max_tokens": 100, "messages": messages, "tools": [TOOL_A]}
        if stream:
            with client.messages.stream(**how) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**how)
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        said = "".join(block.text for block in answer.content if block.type == "text")
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert (answer.stop_reason == "tool_use") == bool(calls)
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": computed(str(call.input["expression"]))}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
    return {"right": float(problem["columns"]["answer"] in said)}


def claude_streams(problem: Problem) -> Scores:
    return claude(problem, stream=True)


async def at_once(problem: Problem) -> None:
    """Three requests of the same at the same time, and two more behind the answer to the first."""
    client, messages = openai.AsyncOpenAI(), problem["messages"]

    async def ask(messages: Any) -> str:
        answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=30)
        return answer.choices[0].message.content or ""

    said, *_ = await asyncio.gather(*(ask(messages) for _ in range(3)))
    for way in ("up", "down"):
        await ask([*messages, {"role": "assistant", "content": said}, {"role": "user", "content": way}])


def wrong(problem: Problem) -> Scores:
    """Asks for what must not be answered: 1 for each that was refused as its client expects it, with a word of it."""
    client, messages, found = OpenAI(max_retries=0), problem["messages"], {}
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    cases: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 0.3}, "n": {"n": 2}, "logit_bias": {"logit_bias": {"7": 1}},
        "logprobs": {"logprobs": True}, "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
        "image_url": {"messages": [{"role": "user", "content": picture}]}, "max_tokens": {"max_tokens": 0},
        "critic": {"messages": [{"role": "critic", "content": "?"}]}, "at least one": {"messages": []},
        "response_format": {"response_format": {"type": "json_object"}}, "seed": {"seed": 7},
    }  # fmt: skip
    for word, how in cases.items():
        try:
            client.chat.completions.create(**({"model": "any", "messages": messages} | how))
            found[word] = 0.0
        except openai.BadRequestError as error:
            found[word] = float(word in str(error))
    try:
        anthropic.Anthropic(max_retries=0).messages.create(
            model="any", max_tokens=9, messages=[*messages, {"role": "assistant", "content": "It is"}]
        )
        found["prefill"] = 0.0
    except anthropic.BadRequestError as error:
        found["prefill"] = float("role user" in str(error))
    found["key"] = found["claude key"] = found["path"] = 0.0
    try:
        OpenAI(api_key="sk-other").chat.completions.create(model="any", messages=messages)
    except openai.AuthenticationError:
        found["key"] = 1.0
    try:
        anthropic.Anthropic(api_key="sk-other").messages.create(model="any", max_tokens=9, messages=messages)
    except anthropic.AuthenticationError:
        found["claude key"] = 1.0
    try:
        client.embeddings.create(model="any", input="?")
    except openai.NotFoundError as error:
        found["path"] = float("/v1/chat/completions" in str(error))
    for name, body in (("json", b"{"), ("deep", b"[" * 100000), ("list", b"[]"), ("latin", b'"\xff"')):
        found[name] = float(posted(body) == 400)
    found["long"] = float(posted(b" " * (9 << 20)) in (413, 0))
    found["models"] = float([model.id for model in client.models.list()] == ["policy"])
    asked(client, messages)
    return found


def posted(body: bytes) -> int:
    """The status of a request with that body; 0 if it was cut off while it was sent."""
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, {"x-api-key": key})) as ok:
            return int(ok.status)
    except urllib.error.HTTPError as error:
        return error.code if "message" in json.load(error)["error"] else -1
    except urllib.error.URLError:
        return 0


def stops(problem: Problem) -> Scores:
    said = asked(OpenAI(), problem["messages"], stop=["</answer>", "37"]).content
    return {"before": float("37" not in said and "</answer>" not in said)}


def greedy(problem: Problem) -> None:
    asked(OpenAI(), problem["messages"], temperature=0, seed=3)


def dated(problem: Problem) -> None:
    asked(OpenAI(), [{"role": "system", "content": f"Process {os.getpid()}."}, *problem["messages"]])


def goes_on(problem: Problem) -> None:
    while True:
        asked(OpenAI(), problem["messages"])


def never_ends(problem: Problem) -> None:
    while True:
        try:
            asked(OpenAI(), problem["messages"])
        except openai.BadRequestError:
            continue


def raises(problem: Problem) -> None:
    asked(OpenAI(), problem["messages"])
    raise FileNotFoundError("plan.txt")


def told(problem: Problem) -> Scores:
    asked(OpenAI(), problem["messages"])
    secrets = {"GLEANER_TEST_TOKEN", "ANTHROPIC_AUTH_TOKEN"} & os.environ.keys()
    same = sys.argv[2:] == ["888", problem["messages"][0]["content"], "{}", "a b"]
    return {"told": float(same), "secrets": float(len(secrets))}


def leaves(problem: Problem) -> Scores:
    asked(OpenAI(), problem["messages"])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    return {"child": float(child.pid)}


def hangs(problem: Problem) -> None:
    asked(OpenAI(), problem["messages"])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(problem["columns"]["told"], "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def not_a_number(problem: Problem) -> float:
    asked(OpenAI(), problem["messages"])
    return float("nan")


def fifo(problem: Problem) -> None:
    asked(OpenAI(), problem["messages"])
    os.mkfifo(os.environ["GLEANER_REWARD"])


def main(kind: str, *words: str) -> None:
    with open(os.environ["GLEANER_PROBLEM"]) as file:
        reward = globals()[kind](json.load(file))
    if reward is not None:
        with open(os.environ["GLEANER_REWARD"], "w") as file:
            json.dump(reward, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
