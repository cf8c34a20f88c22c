"""The official openai client, unchanged, against real processes and the real model."""

import asyncio
import base64
import math
import struct

import openai
import pytest

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "Name the capital of Germany."}]


def test_chat(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=16, temperature=0)
    assert "Berlin" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_concatenates_to_the_whole_answer(client, model):
    arguments = {"model": model, "messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 24}
    whole = client.chat.completions.create(**arguments, temperature=0).choices[0]
    chunks = list(
        client.chat.completions.create(**arguments, temperature=0, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.finish_reason
    ]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0


def test_several_prompts_and_choices(client, model):
    answer = client.completions.create(model=model, prompt=["A", "B", "C"], n=2, max_tokens=3, temperature=1, seed=1)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.completion_tokens <= 18


def test_several_answers_in_a_chat(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, n=2, max_tokens=4, temperature=1, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1] and all(
        choice.message.content for choice in answer.choices
    )
    assert answer.usage.completion_tokens <= 8


def test_a_model_by_its_name(client, model):
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_token_ids_in(client, model):
    answer = client.completions.create(model=model, prompt=[1, 2, 3], max_tokens=2, temperature=0)
    assert answer.usage.prompt_tokens == 3


def test_stop_strings_and_seeds(client, model):
    answer = client.completions.create(
        model=model, prompt="1, 2, 3, 4,", max_tokens=24, temperature=0, stop=[" 7"]
    ).choices[0]
    assert " 7" not in answer.text and answer.finish_reason == "stop" and answer.text.startswith(" 5, 6")

    def draw() -> str:
        return (
            client.chat.completions.create(model=model, messages=QUESTION, max_tokens=16, temperature=1, seed=7)
            .choices[0]
            .message.content
        )

    assert draw() == draw()


def test_beams_the_best_of_several_and_priorities(client, model):
    wishes = {"use_beam_search": True, "length_penalty": 0.5}
    arguments = {"model": model, "messages": QUESTION, "max_tokens": 12}
    beams = client.chat.completions.create(**arguments, n=3, extra_body=wishes).choices
    texts = [choice.message.content for choice in beams]
    assert len(set(texts)) == 3 and "Berlin" in texts[0]
    with client.chat.completions.create(**arguments, n=3, extra_body=wishes, stream=True) as stream:
        streamed = {
            choice.index: choice.delta.content for chunk in stream for choice in chunk.choices if choice.delta.content
        }
    assert [streamed[index] for index in range(3)] == texts
    best = client.completions.create(
        model=model, prompt=["A", "B"], n=2, best_of=4, max_tokens=4, temperature=1, seed=3
    )
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    with pytest.raises(openai.BadRequestError, match="--scheduling-policy fcfs"):
        client.completions.create(model=model, prompt="A", extra_body={"priority": 1})


def test_logprobs(client, model):
    arguments = {"model": model, "messages": QUESTION, "max_tokens": 8, "temperature": 0, "logprobs": True}
    answer = client.chat.completions.create(**arguments, top_logprobs=3)
    whole = answer.choices[0].logprobs.content
    assert len(whole) == answer.usage.completion_tokens
    for token in whole:  # greedy: the token is the likeliest, whose logprob is the model's own
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].token == token.token
        assert -20 < token.logprob <= 0 and bytes(token.bytes).decode() == token.token
    with client.chat.completions.create(**arguments, top_logprobs=3, stream=True) as stream:
        streamed = [
            token
            for chunk in stream
            for choice in chunk.choices
            if choice.logprobs
            for token in choice.logprobs.content
        ]
    assert streamed == whole
    scored = client.completions.create(
        model=model, prompt="The sky is blue", max_tokens=0, echo=True, logprobs=2
    ).choices[0]
    assert scored.text == "The sky is blue" and "".join(scored.logprobs.tokens) == scored.text
    assert scored.logprobs.token_logprobs[0] is None and all(value < 0 for value in scored.logprobs.token_logprobs[1:])
    both = client.completions.create(
        model=model, prompt="The sky is blue", max_tokens=3, temperature=0, echo=True, logprobs=2
    ).choices[0]
    alone = client.completions.create(
        model=model, prompt="The sky is blue", max_tokens=3, temperature=0, logprobs=2
    ).choices[0]
    assert both.text == "The sky is blue" + alone.text and both.logprobs.token_logprobs[0] is None
    assert len(alone.logprobs.tokens) == len(alone.logprobs.text_offset) == len(alone.logprobs.top_logprobs) == 3
    assert "".join(alone.logprobs.tokens) == alone.text and all(len(top) >= 2 for top in alone.logprobs.top_logprobs)
    assert both.logprobs.tokens == scored.logprobs.tokens + alone.logprobs.tokens
    assert both.logprobs.token_logprobs[-3:] == alone.logprobs.token_logprobs
    extras = {"return_token_ids": True, "prompt_logprobs": 0}
    choice = client.completions.create(model=model, prompt="The sky is blue", max_tokens=1, extra_body=extras).choices[
        0
    ]
    of_prompt = [next(iter(entry.values()))["logprob"] for entry in choice.prompt_logprobs[1:]]
    assert of_prompt == scored.logprobs.token_logprobs[1:] and len(choice.prompt_token_ids) == len(of_prompt) + 1


def test_biased_and_banned(client, model):
    arguments = {"model": model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    answer = client.chat.completions.create(**arguments, extra_body={"return_token_ids": True})
    first = answer.choices[0].token_ids[0]
    other = client.chat.completions.create(
        **arguments, logit_bias={str(first): -100}, extra_body={"return_token_ids": True}
    )
    assert first not in other.choices[0].token_ids
    without = client.chat.completions.create(**arguments, extra_body={"bad_words": ["Berlin"]})
    assert "Berlin" in answer.choices[0].message.content and "Berlin" not in without.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.chat.completions.create(**arguments, logit_bias={"10000000": 1})


def test_errors_are_the_clients_own_types(client, model):
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="nobody", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=model, messages=QUESTION, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=model, messages=QUESTION, temperature="hot")
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.chat.completions.create(model=model, messages=QUESTION, max_tokens=100_000)
    with pytest.raises(openai.BadRequestError, match="8192") as refused:
        client.completions.create(model=model, prompt="a " * 40_000, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"


def test_embeddings_as_numbers_and_as_base64(client, model):
    texts = ["The sea is blue", "Blue is the colour of the sea", "Count the stars"]
    answer = client.embeddings.create(model=model, input=texts, encoding_format="float")
    vectors = [item.embedding for item in answer.data]
    assert [item.index for item in answer.data] == [0, 1, 2] and len({tuple(vector) for vector in vectors}) == 3
    assert all(math.isclose(math.hypot(*vector), 1, abs_tol=1e-4) for vector in vectors)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
    packed = client.embeddings.create(model=model, input=texts, encoding_format="base64").data
    size = len(vectors[0])
    assert [list(struct.unpack(f"<{size}f", base64.b64decode(item.embedding))) for item in packed] == [
        pytest.approx(vector, abs=1e-7) for vector in vectors
    ]
    # Left out, the client asks for base64 and gives numbers.
    (alone,) = client.embeddings.create(model=model, input=texts[0]).data
    assert alone.embedding == pytest.approx(vectors[0], abs=1e-7), "whoever else is embedded beside it"
    assert len(client.embeddings.create(model=model, input=texts[0], dimensions=8).data[0].embedding) == 8


async def test_64_streams_a_third_of_them_cut_off(server, model):
    """What is left at the end: nothing running, nothing waiting, no page in use; and the others' text is untouched."""
    async with openai.AsyncOpenAI(base_url=server.base + "/v1", api_key="x", max_retries=0, timeout=300) as client:

        async def story(number: int) -> str:
            stream = await client.completions.create(
                model=model,
                prompt=f"Story number {number % 4}: Once upon a time",
                max_tokens=400 if number % 3 == 0 else 24,  # those to be cut off cannot have ended before
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].text if chunk.choices else ""
                if number % 3 == 0 and len(text) > 8:
                    await stream.close()
                    return "cut"
            return text

        texts = await asyncio.gather(*(story(number) for number in range(64)))
    assert texts.count("cut") == 22
    whole = [text for text in texts if text != "cut"]
    assert len(set(whole)) <= 4 + 2 and all(whole)  # four prompts; a near tie may part two of them
    assert server.wait_until_idle() == (0, 0, 0)
    assert server.metric("vllm:request_success_total", 'finished_reason="abort"') >= 22


def test_a_bad_request_leaves_the_others_alone(server, model):
    bad: list[object] = [
        b"{not json",
        b"\xff\xfe",
        {"model": model},
        {"model": model, "prompt": ""},
        {"model": model, "prompt": [10**9]},
        {"model": model, "prompt": "x", "max_tokens": 10**6},
        {"model": model, "prompt": "x" * 200_000},
        {"model": model, "prompt": "x", "n": 10**6},
        {"model": model, "prompt": "x", "temperature": "hot"},
    ]
    for body in bad:
        status, text = server.post("/v1/completions", body)
        assert 400 <= status < 500 and '"error"' in text, (body, status, text)
    status, text = server.post("/v1/completions", {"prompt": "The sky is", "max_tokens": 4, "temperature": 0})
    assert status == 200, text
