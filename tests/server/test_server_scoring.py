"""/score, /rerank, /classify and /pooling: the real app over the real engine with small random models, held against transformers; and what
is refused."""

import base64
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

from octavo.config import Config, replace
from octavo.engine.build import start_engine
from octavo.engine.in_process_client import InProcessClient
from octavo.server.app import build_app
from octavo.text import load_text
from octavo.weights.sources.source import local
from tests.doubles import REPORT, ScriptedEngine
from tests.engine.test_engine_embed import CLS, MEAN_POOLING, SEP, SMALL, bert, expected, write
from tests.models import checkpoints
from tests.server.batch.test_batch_batches import background, content, create, until, upload
from tests.server.conftest import Serve, error_of
from tests.server.test_server_embeddings import ENCODER, embeds

QUERY = "7 12 90"
DOCUMENTS = ["33 34", "5 6 7 8 9 10 11", "101", "33 34 120 121"]


class Server:
    """A model in memory. "7 12" are the ids 7 and 12; a text stands between CLS and SEP, a pair as CLS a SEP b SEP."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.config = replace(Config(), **({"cpu_threads": 1, "max_num_seqs": 3} | options))
        self.client = InProcessClient(start_engine(self.config, local(folder), "tiny"))
        self.app = build_app(self.client, load_text(folder), self.config, "tiny")
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://localhost")

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def close(self) -> None:
        await self.http.aclose()
        self.app.state.service.compiler.close()
        self.app.state.service.tenants.close()
        self.client.close()


def cross_encoder(folder: Path, **more: Any) -> tuple[PreTrainedModel, Path]:
    model = checkpoints._randomised(BertForSequenceClassification(BertConfig(**SMALL, num_labels=1, **more)))
    return model, write(model, folder)


def logits(model: PreTrainedModel, ids: list[int], second_at: int | None = None) -> torch.Tensor:
    types = [int(second_at is not None and at >= second_at) for at in range(len(ids))]
    with torch.no_grad():
        return model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0]


def pair(first: str, second: str) -> tuple[list[int], int]:
    head = [CLS, *map(int, first.split()), SEP]
    return [*head, *map(int, second.split()), SEP], len(head)


@pytest.fixture
async def started() -> AsyncIterator[list[Server]]:
    opened: list[Server] = []
    yield opened
    for server in opened:
        await server.close()


async def test_a_cross_encoder_scores_as_transformers(started: list[Server], tmp_path: Path) -> None:
    model, folder = cross_encoder(tmp_path / "model")
    started.append(server := Server(folder))
    raw = [float(logits(model, *pair(QUERY, text))) for text in DOCUMENTS]
    wanted = torch.tensor(raw).sigmoid().tolist()
    num_tokens = sum(len(pair(QUERY, text)[0]) for text in DOCUMENTS)

    answer = await server.post("/v1/score", {"model": "tiny", "queries": QUERY, "documents": DOCUMENTS})
    assert [each["score"] for each in answer["data"]] == pytest.approx(wanted, abs=1e-5)
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(at, "score") for at in range(4)]
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    assert answer["id"].startswith("score-") and (answer["object"], answer["model"]) == ("list", "tiny")
    for first, second in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items")):
        same = await server.post("/score", {first: [QUERY], second: DOCUMENTS})
        assert same["data"] == answer["data"]
    both = await server.post("/score", {"text_1": DOCUMENTS[:2], "text_2": DOCUMENTS[2:]})
    wanted_both = [
        float(logits(model, *pair(*its)).sigmoid()) for its in zip(DOCUMENTS[:2], DOCUMENTS[2:], strict=True)
    ]
    assert [each["score"] for each in both["data"]] == pytest.approx(wanted_both, abs=1e-5)
    plain = await server.post("/score", {"text_1": QUERY, "text_2": DOCUMENTS, "use_activation": False})
    assert [each["score"] for each in plain["data"]] == pytest.approx(raw, abs=1e-5)

    order = sorted(range(4), key=lambda at: -wanted[at])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/v1/reranking"):
        ranked = await server.post(path, {"query": QUERY, "documents": DOCUMENTS})
        assert [each["index"] for each in ranked["results"]] == order
        assert [each["document"] for each in ranked["results"]] == [{"text": DOCUMENTS[at]} for at in order]
        assert ranked["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    given = {"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS], "top_n": 2, "return_documents": False}
    ranked = await server.post("/rerank", given)
    assert [each.keys() for each in ranked["results"]] == [{"index", "relevance_score"}] * 2
    assert [each["relevance_score"] for each in ranked["results"]] == pytest.approx(
        [wanted[at] for at in order[:2]], abs=1e-5
    )
    assert "vllm:request_success_total" in (await server.http.get("/metrics")).text


async def test_pairs_are_cut_as_the_tokenizers_library_cuts_them(started: list[Server], tmp_path: Path) -> None:
    model, folder = cross_encoder(tmp_path / "model")
    started.append(server := Server(folder))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    long, short = " ".join(str(3 + at) for at in range(70)), " ".join(str(80 + at) for at in range(25))
    for first, second, most in ((long, short, 64), (short, long, 41), (long, long, 33), (short, short, 20)):
        tokenizer.enable_truncation(most)
        found = tokenizer.encode(first, second)
        wanted = float(logits(model, found.ids, found.type_ids.index(1)).sigmoid())
        answer = await server.post("/score", {"text_1": first, "text_2": second, "truncate_prompt_tokens": most})
        assert answer["usage"]["prompt_tokens"] == len(found.ids) == most
        assert answer["data"][0]["score"] == pytest.approx(wanted, abs=1e-5)
    answer = await server.post("/rerank", {"query": short, "documents": [long], "max_tokens_per_doc": 3})
    assert answer["usage"]["prompt_tokens"] == 25 + 3 + 3
    answer = await server.post("/rerank", {"query": short, "documents": ["9"], "max_tokens_per_query": 2})
    assert answer["usage"]["prompt_tokens"] == 2 + 1 + 3
    error = error_of(await server.http.post("/score", json={"text_1": short, "text_2": ["9", long]}), 400)
    assert error["param"] == "text_2[1]" and "98 tokens together; at most 64 fit" in error["message"], error


async def test_a_key_is_charged_for_pairs(started: list[Server], tmp_path: Path) -> None:
    _, folder = cross_encoder(tmp_path / "model")
    settings = json.dumps({"one": {"name": "one", "budget_tokens": 20}})
    started.append(server := Server(folder, api_key="one", key_settings=settings, files_folder=str(tmp_path / "files")))
    server.http.headers["authorization"] = "Bearer one"
    answer = await server.post("/rerank", {"query": "7 8", "documents": ["9", "10 11"]})
    assert answer["usage"]["prompt_tokens"] == 6 + 7
    used = (await server.http.get("/v1/usage")).json()
    assert '"total_tokens": 13' in json.dumps(used) or '"prompt_tokens": 13' in json.dumps(used), used
    error = error_of(await server.http.post("/score", json={"text_1": "7 8 9", "text_2": "9 10"}), 429)
    assert error["code"] == "insufficient_quota" and "7 of its 20 tokens a day left" in error["message"]


async def test_an_xlm_roberta_cross_encoder(started: list[Server], tmp_path: Path) -> None:
    """Its tokenizer is a Unigram model with spaces as part of the pieces, and a pair stands as <s> a </s> </s> b </s>."""
    config = XLMRobertaConfig(**SMALL, pad_token_id=1, type_vocab_size=1, num_labels=1)
    model = checkpoints._randomised(XLMRobertaForSequenceClassification(config))
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    words = ["▁the", "▁river", "▁bank", "▁is", "▁wide", "▁Ufer", "▁money", "s", "e", "▁"]
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    tokenizer = Tokenizer(
        models.Unigram([*pieces, *((word, -float(at + 1)) for at, word in enumerate(words))], unk_id=3)
    )
    tokenizer.add_special_tokens([piece for piece, _ in pieces])
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    started.append(server := Server(folder))
    query, documents = "the river bank", ["the Ufer is wide", "moneys", "the ﬁ"]
    for text in documents:
        assert tokenizer.encode(query, text).ids.count(2) == 3
    with torch.no_grad():
        wanted = [
            float(model(torch.tensor([tokenizer.encode(query, text).ids])).logits[0].sigmoid()) for text in documents
        ]
    answer = await server.post("/rerank", {"query": query, "documents": documents})
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert [found[at] for at in range(3)] == pytest.approx(wanted, abs=1e-5)
    used = (await server.post("/score", {"text_1": query, "text_2": documents}))["usage"]
    assert used["prompt_tokens"] == sum(len(tokenizer.encode(query, text).ids) for text in documents)


async def test_classifiers_give_labels(started: list[Server], tmp_path: Path) -> None:
    names = {0: "anger", 1: "joy", 2: "fear"}
    config = RobertaConfig(**SMALL, pad_token_id=0, type_vocab_size=1, id2label=names)  # CLS is 1
    model = checkpoints._randomised(RobertaForSequenceClassification(config))
    started.append(server := Server(write(model, tmp_path / "model")))
    texts = ["7 12", "101 5 6 7"]
    with torch.no_grad():
        raw = [model(torch.tensor([[CLS, *map(int, text.split()), SEP]])).logits[0] for text in texts]
    answer = await server.post("/classify", {"input": texts})
    for found, wanted in zip(answer["data"], raw, strict=True):
        assert found["probs"] == pytest.approx(wanted.softmax(0).tolist(), abs=1e-5)
        assert (found["label"], found["num_classes"]) == (names[int(wanted.argmax())], 3)
    plain = await server.post("/pooling", {"input": texts, "use_activation": False})
    assert plain["data"][1]["data"] == pytest.approx(raw[1].tolist(), abs=1e-5), "labels are what a classifier pools to"
    refused = error_of(await server.http.post("/rerank", json={"query": "7", "documents": ["8"]}), 400)
    assert "a classifier with 3 labels" in refused["message"]
    embedded = await server.post("/v1/embeddings", {"input": texts[0]})
    assert len(embedded["data"][0]["embedding"]) == 48


async def test_saved_activations(started: list[Server], tmp_path: Path) -> None:
    model, folder = cross_encoder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4"}
    (folder / "config.json").write_text(json.dumps(config))
    started.append(server := Server(folder))
    answer = await server.post("/score", {"text_1": QUERY, "text_2": "33"})
    assert answer["data"][0]["score"] == pytest.approx(float(logits(model, *pair(QUERY, "33"))), abs=1e-5)


async def test_an_embedding_model_scores_by_the_cosine(started: list[Server], tmp_path: Path) -> None:
    model = bert()
    started.append(server := Server(write(model, tmp_path / "model", MEAN_POOLING, normalize=False)))
    vectors = {text: expected(model, [CLS, *map(int, text.split()), SEP], "mean") for text in (QUERY, *DOCUMENTS)}
    wanted = [float(vectors[QUERY] @ vectors[text]) for text in DOCUMENTS]
    answer = await server.post("/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    assert [each["score"] for each in answer["data"]] == pytest.approx(wanted, abs=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(len(text.split()) + 2 for text in vectors), (
        "the query is computed once"
    )
    ranked = await server.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 1})
    assert ranked["results"][0]["index"] == max(range(4), key=wanted.__getitem__)

    given = [CLS, 7, 12, 90, SEP]
    with torch.no_grad():
        states = model(torch.tensor([given])).last_hidden_state[0]
    pooled = await server.post("/pooling", {"input": QUERY, "task": "token_embed", "normalize": False})
    (found,) = pooled["data"]
    torch.testing.assert_close(torch.tensor(found["data"]), states, atol=1e-5, rtol=1e-5)
    packed = await server.post(
        "/pooling",
        {"input": QUERY, "task": "token_embed", "encoding_format": "base64", "dimensions": 8, "use_activation": True},
    )
    numbers = struct.unpack("<40f", base64.b64decode(packed["data"][0]["data"]))
    cut = torch.nn.functional.normalize(states[:, :8], dim=1).flatten()
    torch.testing.assert_close(torch.tensor(numbers), cut, atol=1e-5, rtol=1e-5)
    one = await server.post("/pooling", {"input": QUERY})
    same = await server.post("/v1/embeddings", {"input": QUERY})
    assert one["data"][0]["data"] == same["data"][0]["embedding"] and one["data"][0]["object"] == "pooling"
    refused = error_of(await server.http.post("/classify", json={"input": "7"}), 400)
    assert "no classification head" in refused["message"]


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # case → route, body, the field it is about, what the message says
    "no sides": ("/score", {}, "queries", "two sides are needed"),
    "one side": ("/score", {"text_1": "a"}, "text_2", "two sides are needed"),
    "sides of two pairs": ("/score", {"text_1": "a", "documents": ["b"]}, "text_2", "two sides are needed"),
    "other counts": ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "2 texts and text_2 3"),
    "no texts": ("/score", {"text_1": "a", "text_2": []}, "text_2", "is empty"),
    "a number": ("/score", {"text_1": "a", "text_2": [3]}, "text_2[0]", "must be a string"),
    "an image": ("/score", {"text_1": "a", "text_2": {"content": []}}, "text_2", "only text can be scored"),
    "an empty text": ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]", "is empty"),
    "an empty query": ("/rerank", {"query": "", "documents": ["b"]}, "query", "is empty"),
    "no query": ("/rerank", {"documents": ["b"]}, "query", "is missing"),
    "no documents": ("/rerank", {"query": "a"}, "documents", "is missing"),
    "too many": ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents", "at most 2048"),
    "too long": ("/rerank", {"query": "a", "documents": ["b" * 300]}, "documents[0]", "tokens"),
    "hopelessly long": ("/rerank", {"query": "a", "documents": ["b" * 200_000]}, "documents[0]", "characters"),
    "below nothing": ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "at least 0"),
    "a limit below 0": ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1}, "max_tokens_per_doc", "from 0 to"),
    "a huge limit": ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_query": 10**9}, "max_tokens_per_query", "from 0 to"),
    "other fields of documents": ("/rerank", {"query": "a", "documents": [{"text": "b", "title": "c"}]}, "documents[0]", "must be"),
    "rank_fields": ("/v2/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields", "not supported"),
    "no such task": ("/pooling", {"input": "a", "task": "token_classify"}, "task", "embed, token_embed or classify"),
    "labels of nothing": ("/pooling", {"input": "a", "task": "classify"}, "", "no classification head"),
    "two names": ("/pooling", {"input": "a", "normalize": True, "use_activation": False}, "normalize", "two names"),
    "pooling of every token": ("/pooling", {"input": "a", "task": "token_embed", "pooling": "cls"}, "pooling", "every token"),
    "no input": ("/classify", {}, "input", "is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_wrong_is_named(case: str, serve: Serve) -> None:
    path, body, param, words = REFUSED[case]
    scripted = ScriptedEngine(report=REPORT)
    response = await serve(scripted).post(path, content=json.dumps(body))
    error = error_of(response, 400)
    assert (error["param"] or "") == param and words in error["message"], error
    assert not scripted.requests


async def test_documents_are_reranked_in_batches(serve: Serve, tmp_path: Path) -> None:
    client = serve(ScriptedEngine(embeds, ENCODER), files_folder=str(tmp_path))
    body = {"query": "abc", "documents": ["zzzzz", "abc"]}
    lines = [{"custom_id": f"r{at}", "method": "POST", "url": "/v1/rerank", "body": body} for at in range(2)]
    async with background(client):
        batch = await create(client, await upload(client, *lines), endpoint="/v1/rerank")
        done = await until(client, batch["id"], "completed", "failed")
    answers = await content(client, done["output_file_id"])
    assert [len(each["response"]["body"]["results"]) for each in answers] == [2, 2]


async def test_limits_of_the_server(serve: Serve) -> None:
    scripted = ScriptedEngine(report=REPORT)
    for options, flag in (
        ({"max_request_sequences": 3}, "--max-request-sequences"),
        ({"max_request_tokens": 10}, "--max-request-tokens"),
    ):
        response = await serve(scripted, **options).post("/rerank", json={"query": "abc", "documents": ["abcdef"] * 3})
        error = error_of(response, 400)
        assert error["param"] == "documents" and flag in error["message"], error
    assert not scripted.requests


async def test_vectors_of_all_tokens_have_a_limit(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.server.endpoints.pooling.MAX_NUMBERS", 60)
    report = REPORT.__class__(
        **{name: getattr(REPORT, name) for name in REPORT.__struct_fields__} | {"hidden_size": 16}
    )
    scripted = ScriptedEngine(report=report)
    response = await serve(scripted).post("/pooling", json={"input": ["ab", "cd"], "task": "token_embed"})
    error = error_of(response, 400)
    assert error["param"] == "input" and "4 tokens, whose vectors of 16 numbers are 64" in error["message"]
    assert not scripted.requests
