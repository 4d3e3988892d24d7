"""The server as OpenAI's own client meets it: a real process, real requests."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.asking import chat, complete, text
from tests.server.conftest import KEY
from tests.server.process import Process
from tests.tiny_text import make_tokenizer


def test_models_are_the_base_and_its_adapters(client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert list(listed)[:4] == ["tiny", "a0", "a1", "a2"]
    assert listed["tiny"].parent is None  # type: ignore[attr-defined]
    assert listed["a2"].parent == "tiny"  # type: ignore[attr-defined]
    assert client.models.retrieve("a1").id == "a1"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a77")


def test_each_model_completes_in_its_own_way(client: openai.OpenAI) -> None:
    answer = complete(client, "a1")
    assert (answer.object, answer.model) == ("text_completion", "a1")
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)
    assert answer.usage.total_tokens == 13
    texts = {name: text(client, name) for name in ("tiny", "a0", "a1", "a2", "a3")}
    assert len(set(texts.values())) == 5
    assert texts == {name: text(client, name) for name in texts}


def test_a_chat_is_answered_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    whole = chat(client, "a2")
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.prompt_tokens == len(
        make_tokenizer()("<system>be brief<user>who?<assistant>")["input_ids"]
    )
    chunks = list(chat(client, "a2", stream=True, stream_options={"include_usage": True}))
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    options: Any = {"include_usage": True, "include_obfuscation": False}
    assert list(chat(client, "a2", stream=True, stream_options=options))[-1].usage == whole.usage
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert said == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, "length"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "who?"}]}]
    plain = [{"role": "user", "content": "who?"}]
    by_parts = chat(client, "a2", messages=parts).choices[0].message.content
    assert by_parts == chat(client, "a2", messages=plain).choices[0].message.content


def test_a_completion_streams_what_it_would_say_whole(client: openai.OpenAI) -> None:
    chunks = list(complete(client, "a0", stream=True))
    assert len(chunks) == 8
    assert "".join(chunk.choices[0].text for chunk in chunks) == text(client, "a0")


def test_many_adapters_at_once_each_answer_as_if_alone(client: openai.OpenAI) -> None:
    """Six adapters over three slots; equal because each row of this base is computed by itself."""
    jobs = [(f"a{at % 6}" if at % 7 else "tiny", f"prompt {at}") for at in range(42)]
    alone = [text(client, *job) for job in jobs]
    with concurrent.futures.ThreadPoolExecutor(14) as threads:
        together = list(threads.map(lambda job: text(client, *job), jobs))
    assert together == alone


def test_prompts_may_be_several_or_token_ids(client: openai.OpenAI) -> None:
    ids = make_tokenizer()("hello")["input_ids"]
    both = complete(client, "a0", ["hello", "world"])
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [choice.text for choice in both.choices] == [
        text(client, "a0"),
        text(client, "a0", "world"),
    ]
    assert complete(client, "a0", ids).choices[0].text == text(client, "a0")
    assert len(complete(client, "a0", [ids, ids]).choices) == 2


def test_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"n": 3, "temperature": 1.5, "seed": 5, "max_tokens": 12}
    first, second = (complete(client, "a0", **settings) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in second.choices]
    # Each choice has the seed of its own request.
    assert texts[2] == text(client, "a0", temperature=1.5, seed=7, max_tokens=12)
    streamed = ["", "", ""]
    for chunk in complete(client, "a0", stream=True, **settings):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_stop_strings_cut_whole_answers_and_streams(client: openai.OpenAI) -> None:
    whole = text(client, "a3", max_tokens=12)
    stop = whole[5:7]
    expected = whole[: whole.index(stop)]
    cut = complete(client, "a3", max_tokens=12, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (expected, "stop")
    chunks = list(complete(client, "a3", max_tokens=12, stop=["\n", stop], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs_have_openais_shapes(client: openai.OpenAI) -> None:
    found = complete(client, "a0", logprobs=3).choices[0]
    assert "".join(found.logprobs.tokens) == found.text
    assert found.logprobs.text_offset == [*range(8)]
    for token, logprob, top in zip(
        found.logprobs.tokens,
        found.logprobs.token_logprobs,
        found.logprobs.top_logprobs,
        strict=True,
    ):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values()) < 0
    places = chat(client, "a0", logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(places) == 8
    assert places[0].top_logprobs[0].token == places[0].token
    assert bytes(places[0].bytes).decode() == places[0].token
    streamed = [c.choices[0].logprobs for c in complete(client, "a0", logprobs=0, stream=True)]
    assert [each.text_offset for each in streamed] == [[at] for at in range(8)]
    assert chat(client, "a0").choices[0].logprobs is None


def test_logprobs_end_with_the_text_that_a_stop_string_cuts(client: openai.OpenAI) -> None:
    whole = complete(client, "a3", max_tokens=12, logprobs=1).choices[0]
    stop = whole.text[5:8]
    length = whole.text.index(stop)
    settings: dict[str, Any] = {"max_tokens": 12, "stop": stop}
    cut = complete(client, "a3", logprobs=1, **settings)
    assert "".join(cut.choices[0].logprobs.tokens) == cut.choices[0].text == whole.text[:length]
    assert cut.choices[0].logprobs.token_logprobs == whole.logprobs.token_logprobs[:length]
    assert cut.usage.completion_tokens == length + len(stop)
    text, offsets = "", []
    for chunk in complete(client, "a3", logprobs=1, stream=True, **settings):
        logprobs = chunk.choices[0].logprobs
        tokens = [] if logprobs is None else logprobs.tokens
        assert "".join(tokens) == chunk.choices[0].text
        text += chunk.choices[0].text
        offsets += [] if logprobs is None else logprobs.text_offset
    assert (text, offsets) == (whole.text[:length], [*range(length)])
    said = chat(client, "a3", max_tokens=12).choices[0].message.content
    for is_streamed in (False, True):
        asked = {"max_tokens": 12, "stop": said[4:6], "logprobs": True, "stream": is_streamed}
        answer = chat(client, "a3", **asked)
        choices = [chunk.choices[0] for chunk in answer] if is_streamed else answer.choices
        found = [
            place.token for each in choices if each.logprobs for place in each.logprobs.content
        ]
        assert "".join(found) == said[: said.index(said[4:6])]


def test_an_unknown_model_is_not_the_base(client: openai.OpenAI) -> None:
    for name in ("a9", "TINY", "base", "a0@1", " a0"):
        with pytest.raises(openai.NotFoundError) as refused:
            complete(client, name)
        assert refused.value.code == "model_not_found"
        assert f"`{name}` does not exist" in refused.value.message


def test_without_the_right_key_nothing_but_the_page_is_shown(server: Process) -> None:
    wrong = ("", "Bearer", "Bearer sk-kez", "Bearer sk-ke", "Bearer sk-kéy", f"Basic {KEY}", KEY)
    for header in (None, *wrong):
        headers = {} if header is None else {"Authorization": header.encode()}
        with httpx.Client(base_url=server.url, headers=headers) as http:  # type: ignore[arg-type]
            for path in ("/v1/models", "/metrics", "/status", "/openapi.json", "/v1/nothing"):
                refused = http.get(path)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"
                assert refused.headers["www-authenticate"] == "Bearer"
            assert http.post("/v1/completions", content=b"{").status_code == 401
            assert http.get("/health").json() == {"status": "ok"}
            assert http.get("/").status_code == 200
    with pytest.raises(openai.AuthenticationError), server.openai(api_key="wrong") as client:
        client.models.list()


BODIES: list[tuple[dict[str, Any] | bytes, str]] = [
    (b"", "Field required"),
    (b"{", "JSON decode error"),
    (b"[]", "valid dictionary"),
    (b'"hello"', "valid dictionary"),
    (b"\xff\xfe", "JSON decode error"),
    ({"prompt": "x"}, "`model`: Field required"),
    ({"model": "a0"}, "`prompt`: Field required"),
    ({"model": "", "prompt": "x"}, "`model`"),
    ({"model": "a0\n", "prompt": "x"}, "`model`"),
    ({"model": "a0", "prompt": ""}, "at least one token"),
    ({"model": "a0", "prompt": []}, "prompt"),
    ({"model": "a0", "prompt": [[]]}, "at least one token"),
    ({"model": "a0", "prompt": ["x", ""]}, "at least one token"),
    ({"model": "a0", "prompt": [96]}, "tokens must be 0 .. 95; given: 96 .. 96"),
    ({"model": "a0", "prompt": [-1]}, "prompt"),
    ({"model": "a0", "prompt": {"a": 1}}, "`prompt`"),
    ({"model": "a0", "prompt": "x" * 200}, "128 tokens together; given: 200"),
    ({"model": "a0", "prompt": "x", "max_tokens": 0}, "`max_tokens`"),
    ({"model": "a0", "prompt": "x", "max_tokens": 128}, "128 tokens together"),
    ({"model": "a0", "prompt": "x", "max_tokens": 1e30}, "`max_tokens`"),
    ({"model": "a0", "prompt": "x", "temperature": 3}, "`temperature`"),
    ({"model": "a0", "prompt": "x", "temperature": "NaN"}, "`temperature`"),
    ({"model": "a0", "prompt": "x", "top_p": 0}, "`top_p`"),
    ({"model": "a0", "prompt": "x", "n": 17}, "`n`"),
    ({"model": "a0", "prompt": "x", "seed": 2**63}, "`seed`"),
    ({"model": "a0", "prompt": "x", "logprobs": 21}, "`logprobs`"),
    ({"model": "a0", "prompt": "x", "stop": ["a"] * 17}, "`stop`"),
    ({"model": "a0", "prompt": "x", "stop": ""}, "stop strings"),
    ({"model": "a0", "prompt": "x", "stream_options": {}}, "`stream_options` needs `stream`"),
    ({"model": "a0", "prompt": "x", "echo": True}, "`echo` is not supported"),
    ({"model": "a0", "prompt": "x", "logit_bias": {"5": 1}}, "`logit_bias` is not supported"),
    ({"model": "a0", "prompt": "x", "presence_penalty": 0.5}, "`presence_penalty` is not"),
    ({"model": "a0", "prompt": "x", "adapter": "a1"}, "`adapter`: Extra inputs"),
]


@pytest.mark.parametrize(("body", "message"), BODIES, ids=lambda each: str(each)[:50])
def test_a_wrong_body_is_refused_with_the_reason(
    server: Process, body: dict[str, Any] | bytes, message: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with server.http() as http:
        headers = {"Content-Type": "application/json"}
        refused = http.post("/v1/completions", content=content, headers=headers)
    error = refused.json()["error"]
    assert refused.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]


def test_wrong_chats_are_refused_with_the_reason(client: openai.OpenAI) -> None:
    user = {"role": "user", "content": "x"}
    for settings, message in (
        ({"messages": []}, "`messages`"),
        ({"messages": [{"role": "user"}]}, "`messages`"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "refuses the messages: nobody speaks"),
        ({"messages": [user | {"tool_calls": [{"id": "1"}]}]}, "`tool_calls` in a message"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "`content` must be a text, or a list of parts of the type `text`",
        ),
        ({"top_logprobs": 2}, "`top_logprobs` needs `logprobs`"),
        ({"response_format": {"type": "json_object"}}, "`response_format` is not supported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "`tools` is not supported"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, "a0", **settings)
        assert message in refused.value.message
    # What says only what is done anyway is fine.
    neutral = {"presence_penalty": 0, "response_format": {"type": "text"}, "n": 1, "user": "me"}
    empty = user | {"extra": None}
    assert chat(client, "a0", messages=[empty], **neutral).choices


def test_a_large_body_is_refused_before_it_is_read(server: Process) -> None:
    with server.http() as http:
        for content in (b"x" * (5 << 20), iter([b"x" * (1 << 20)] * 6)):
            refused = http.post("/v1/completions", content=content)
            assert refused.status_code == 413
            assert refused.json()["error"]["code"] == "request_too_large"
        assert http.get("/health").status_code == 200


def test_routes_that_are_not_there_are_refused_in_openais_shape(server: Process) -> None:
    with server.http() as http:
        assert http.get("/v1/nothing").json()["error"]["message"] == "Not Found"
        assert http.get("/v1/completions").status_code == 405
        # A page of another site cannot send JSON without asking first.
        refused = http.post("/v1/completions", content=b'{"model": "a0", "prompt": "x"}')
        assert refused.status_code == 400


def test_an_idle_connection_outlives_its_clients_use_of_it(server: Process) -> None:
    """OpenAI's client uses one again within 5 s; a server that closes it then breaks a request."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    connection.request("GET", "/health")
    connection.getresponse().read()
    kept = connection.sock
    time.sleep(6)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    assert connection.sock is kept
    connection.close()


def test_a_client_that_leaves_ends_its_request(server: Process) -> None:
    body = {"model": "a1", "prompt": "x", "max_tokens": 120, "ignore_eos": True}
    num_before = _cancelled(server)
    with server.http() as http:
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            next(response.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=body | {"n": 16}, timeout=0.15)
    server.wait_for(running=0, waiting=0)
    assert _cancelled(server) >= num_before + 2


def _cancelled(server: Process) -> int:
    return int(_metrics(server).get('lorafold_requests_total{adapter="a1",outcome="cancelled"}', 0))


def _metrics(server: Process) -> dict[str, float]:
    with server.http() as http:
        lines = http.get("/metrics").raise_for_status().text.splitlines()
    return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if x[0] != "#")}


def test_metrics_count_what_happens(server: Process, client: openai.OpenAI) -> None:
    before = _metrics(server)
    complete(client, "a0", max_tokens=5)
    complete(client, "tiny", max_tokens=3)
    after = _metrics(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown('lorafold_requests_total{adapter="a0",outcome="length"}') == 1
    assert grown('lorafold_prompt_tokens_total{adapter="a0"}') == 5
    assert grown('lorafold_answer_tokens_total{adapter="a0"}') == 5
    assert grown('lorafold_answer_tokens_total{adapter=""}') == 3
    assert after['lorafold_running{adapter="a0"}'] == 0
    assert after["lorafold_slots"] == 3
    assert 1 <= after["lorafold_slots_used"] <= 3
    assert after["lorafold_loads_total"] >= 6
    assert after["lorafold_load_seconds_total"] > 0
    assert after["lorafold_placements_total"] >= after["lorafold_evictions_total"]


def test_sigterm_finishes_what_runs_and_takes_no_more(
    model_folder: Path, adapter_root: Path
) -> None:
    server = Process(["--model", model_folder, "--adapter", f"a0={adapter_root}/a0"])
    try:
        client = server.wait_until_up().openai()
        expected = text(client, "a0", max_tokens=120)
        stream = complete(client, "a0", max_tokens=120, stream=True)
        said = next(stream).choices[0].text
        server.terminate()
        time.sleep(0.1)
        with pytest.raises(openai.APIConnectionError), server.openai() as late:
            text(late, "a0")
        for chunk in stream:
            said += chunk.choices[0].text
        assert said == expected
        assert chunk.choices[0].finish_reason == "length"
        assert server.wait() == 0
        client.close()
    finally:
        server.stop()
    assert not any("Traceback" in line for line in server.lines)
