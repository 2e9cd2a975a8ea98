"""OpenAI batch files: requests as they are, answers as the official client's types read them."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specgen.engine.request import EngineRequest, TokenLogprob
from specgen.errors import RowError
from specgen.job.merge import merge
from specgen.job.openai_batch import request_of

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"model": "stories", "messages": [{"role": "user", "content": "a dog"}], "max_tokens": 50} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"model": "stories", "prompt": "once upon", "max_tokens": 50} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def sets(workplace: Any) -> list[str]:
    (workplace.folder / "chat.jinja").write_text(TEMPLATE)
    return [f"input.chat_template={workplace.folder / 'chat.jinja'}"]


def answers(workplace: Any) -> dict[str, dict[str, Any]]:
    return {record["custom_id"]: record for record in workplace.records()}


def test_requests_are_answered_in_the_batch_form(
    workplace: Any, fake_engine: Any, sets: list[str], tokenizer: Any
) -> None:
    workplace.write([chat("a"), completion("b", n=3, temperature=0.5), completion("c", prompt=[5, 6, 7], stop=None)])
    engine = fake_engine()
    stats = workplace.run(engine, *sets)
    assert (stats.rows, stats.samples) == (3, 5)
    records = answers(workplace)
    assert list(records) == ["a", "b", "c"]
    for record in records.values():
        assert list(record) == ["id", "custom_id", "response", "error"]
        assert record["error"] is None
        assert record["response"]["status_code"] == 200
        assert record["response"]["body"]["model"] == "stories"
        usage = record["response"]["body"]["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert tokenizer.decode(engine.requests[0].prompt_token_ids) == "user: a dog\n"
    assert engine.requests[0].prompt_token_ids.count(0) == 1
    (choice,) = records["a"]["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": "user: a dog\n", "refusal": None}
    assert [one["index"] for one in records["b"]["response"]["body"]["choices"]] == [0, 1, 2]
    assert len({request.seed for request in engine.requests[1:4]}) == 3
    assert records["b"]["response"]["body"]["choices"][2]["text"] == "once upon"


def test_failures_are_lines_too(workplace: Any, fake_engine: Any, sets: list[str]) -> None:
    def script(request: EngineRequest) -> tuple[list[int], str]:
        return [5], "error" if request.request_id == 1 else "length"

    workplace.write(
        [chat("ok"), chat("engine"), chat("bad", stream=True), chat("long", messages=[]), "broken", {"a": 1}]
    )
    stats = workplace.run(fake_engine(script), *sets)
    assert stats.failed == 5
    records = workplace.records()
    codes = [
        (r["custom_id"], (r["response"] or {}).get("status_code"), (r["error"] or {}).get("code")) for r in records
    ]
    assert codes == [
        ("ok", 200, None),
        ("engine", 500, None),
        ("bad", 400, None),
        ("long", 400, None),
        (None, None, "bad_json"),
        (None, None, "bad_request"),
    ]
    error = records[2]["response"]["body"]["error"]
    assert error["code"] == "bad_sampling"
    assert "stream" in error["message"]
    assert records[4]["error"]["line"] == 5


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"custom_id": None}, "no custom_id"),
        ({"body": None}, "no body"),
        ({"body": 3}, "body must be an object"),
        ({"method": "GET"}, "method must be POST"),
        ({"url": "/v1/embeddings"}, "url must be /v1/chat/completions or /v1/completions"),
    ],
)
def test_what_is_no_request(change: dict[str, Any], part: str) -> None:
    with pytest.raises(RowError, match=part):
        request_of(chat("a") | change)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"temprature": 1}, "unknown or unsupported parameter 'temprature' .did you mean 'temperature'"),
        ({"tools": [{"type": "function"}]}, "tools = .* is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format = .* is not supported"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
        ({"logprobs": 3}, "logprobs must be true or false"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be"),
        ({"top_logprobs": 2}, "top_logprobs goes with logprobs = true"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs goes with logprobs = true"),
        ({"prompt_logprobs": 1}, "unsupported parameter 'prompt_logprobs'"),
        ({"model": None}, "body.model must be a text"),
        ({"messages": "hi"}, "body.messages must be a list"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(body: dict[str, Any], part: str) -> None:
    with pytest.raises(RowError, match=part):
        request_of(chat("a", **body))


def test_a_completion_has_no_top_logprobs() -> None:
    with pytest.raises(RowError, match=r"unsupported parameter 'top_logprobs' .did you mean 'logprobs'"):
        request_of(completion("a", top_logprobs=2))


def test_a_parameter_beside_the_body_is_not_ignored(workplace: Any, fake_engine: Any, sets: list[str]) -> None:
    rows = [completion("a") | {"temperature": 0}, completion("b") | {"sampling": {}}, completion("c") | {"note": 1}]
    workplace.write(rows)
    workplace.run(fake_engine(), *sets)
    bodies = [record["response"]["body"] for record in workplace.records()]
    assert [body.get("error", {}).get("code") for body in bodies] == ["bad_sampling", "bad_sampling", None]
    assert "column 'temperature' looks like the parameter 'temperature', which goes under 'body'" in str(bodies[0])
    workplace.write(rows)
    assert workplace.run(fake_engine(), *sets, "input.keep=[temperature, sampling]").failed == 0


def test_a_prompt_that_was_cut_says_so(workplace: Any, fake_engine: Any, sets: list[str]) -> None:
    workplace.write([completion("a", prompt=[5] * 40), completion("b", prompt=[5] * 4)])
    workplace.run(fake_engine(), *sets, "input.truncate=left", "input.max_prompt_tokens=10")
    cut, whole = (record["response"]["body"] for record in workplace.records())
    assert (cut["prompt_truncated_from"], cut["usage"]["prompt_tokens"]) == (40, 10)
    assert "prompt_truncated_from" not in whole
    read_by_the_official_client(workplace.output)


def test_several_prompts_are_refused_and_one_in_a_list_is_one() -> None:
    with pytest.raises(RowError, match="several prompts"):
        request_of(completion("a", prompt=["x", "y"]))
    assert request_of(completion("a", prompt=["x"])).content == "x"
    assert request_of(completion("a", prompt=[[1, 2]])).content == [1, 2]


def test_parameters_have_their_names_here() -> None:
    body = {
        "max_tokens": None,
        "max_completion_tokens": 9,
        "logprobs": True,
        "top_logprobs": 4,
        "logit_bias": {"5": 1},
        "user": "u",
        "stream": False,
        "seed": 3,
        "response_format": {"type": "text"},
    }
    assert request_of(chat("a", **body)).overrides == {
        "max_tokens": 9,
        "logprobs": 4,
        "logit_bias": {"5": 1},
        "seed": 3,
    }
    assert request_of(completion("a", logprobs=2)).overrides == {"max_tokens": 50, "logprobs": 2}


def test_it_is_resumed_and_merged_by_custom_id(workplace: Any, fake_engine: Any, sets: list[str]) -> None:
    rows: list[Any] = [completion(f"c{i}", prompt=f"story {i}", n=2) for i in range(12)]
    rows[4] = "broken"
    workplace.write(rows)
    workplace.run(fake_engine(), *sets)
    whole = workplace.records()
    lines = workplace.output.read_bytes().splitlines(keepends=True)
    workplace.output.write_bytes(b"".join(lines[:3] + lines[7:]) + b'{"torn')
    engine = fake_engine()
    workplace.run(engine, *sets, fresh=False)
    assert len(engine.requests) == 6
    by_id = {record["id"]: record for record in workplace.records()}
    assert by_id == {record["id"]: record for record in whole}
    parts = [str(workplace.folder / f"p{i}.jsonl") for i in (1, 2)]
    for i, part in enumerate(parts, start=1):
        workplace.run(fake_engine(), f"output.path={part}", *sets, shard=(i, 2))
    merged = workplace.folder / "merged.jsonl"
    merge(str(merged), parts)
    ids = {record["id"] for record in workplace.records(merged)}
    assert ids == {record["id"] for record in whole}


class WithLogprobs:
    """What a row's log-probabilities look like when the engine gives them."""

    entries = (TokenLogprob(417, -0.5, ((417, -0.5), (5, float("-inf")))), TokenLogprob(1, -1.25, ()))


def test_log_probabilities_are_in_the_choices(workplace: Any, fake_engine: Any, sets: list[str]) -> None:
    class Engine(fake_engine):  # type: ignore[misc]
        def get_outputs(self, timeout: float) -> list[Any]:
            return [
                output._replace(new_token_ids=[417, 1], logprobs=list(WithLogprobs.entries))
                for output in super().get_outputs(timeout)
                if output.finish_reason is not None
            ]

    workplace.write([chat("a", logprobs=True, top_logprobs=2), completion("b", logprobs=2)])
    workplace.run(Engine(), *sets)
    records = answers(workplace)
    content = records["a"]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5, -1.25]
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert content[1]["token"] == "<|eos|>"
    of_text = records["b"]["response"]["body"]["choices"][0]["logprobs"]
    assert of_text["token_logprobs"] == [-0.5, -1.25]
    assert of_text["text_offset"] == [0, len(of_text["tokens"][0])]
    read_by_the_official_client(workplace.output)


@pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs the openai package")
def test_the_official_clients_types_read_every_answer(workplace: Any, fake_engine: Any, sets: list[str]) -> None:
    workplace.write([chat("a", n=2), completion("b"), chat("c", stream=True), "broken"])
    workplace.run(fake_engine(), *sets)
    assert read_by_the_official_client(workplace.output) == [
        "ChatCompletion",
        "Completion",
        "ErrorObject",
        "BatchError",
    ]


@pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs the openai package")
def test_a_real_run_is_read_by_the_official_client(workplace: Any, sets: list[str], tmp_path: Path) -> None:
    rows = [
        chat("a", n=2, logprobs=True, top_logprobs=3, max_completion_tokens=4, max_tokens=None),
        completion("b", logprobs=2, max_tokens=4, stop="."),
        completion("c", prompt=[[5, 6, 7]], max_tokens=4),
        chat("d", messages=[{"role": "user", "content": "word " * 3000}]),
        "broken",
    ]
    workplace.write(rows)
    settings = {"model.device": "cpu", "output.path": str(workplace.output), "input.path": str(workplace.input)}
    sets = [*sets, "model.path=stories-7m", *(f"{name}={value}" for name, value in settings.items())]
    recipe = tmp_path / "job.yaml"
    recipe.write_text("sampling: {seed: 7}\n")
    command = [sys.executable, "-P", "-c", "import sys; from specgen.cli.main import main; sys.exit(main())"]
    command += ["run", str(recipe), *(part for one in sets for part in ("--set", one))]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr.decode()
    kinds = ["ChatCompletion", "Completion", "Completion", "ErrorObject", "BatchError"]
    assert read_by_the_official_client(workplace.output) == kinds
    first, second, third, *_ = (record["response"] for record in workplace.records())
    for response in (first, second, third):
        usage = response["body"]["usage"]
        assert usage["completion_tokens"] <= 4 * len(response["body"]["choices"])
    content = first["body"]["choices"][1]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [3] * len(content)
    assert len(second["body"]["choices"][0]["logprobs"]["tokens"]) == second["body"]["usage"]["completion_tokens"]


def read_by_the_official_client(path: Path) -> list[str]:
    """Return the names of the client's types that the lines are."""
    if importlib.util.find_spec("openai") is None:
        return []
    from openai.types import BatchError, Completion
    from openai.types.chat import ChatCompletion
    from openai.types.shared import ErrorObject

    names = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert set(record) == {"id", "custom_id", "response", "error"}
        if record["response"] is None:
            model: Any = BatchError.model_validate(record["error"], strict=True)
        elif record["response"]["status_code"] != 200:
            model = ErrorObject.model_validate(record["response"]["body"]["error"], strict=True)
        else:
            body = record["response"]["body"]
            kind: Any = ChatCompletion if body["object"] == "chat.completion" else Completion
            model = kind.model_validate(body, strict=True)
            assert model.to_dict(exclude_unset=True) == body
        names.append(type(model).__name__)
    return names
