"""The official openai client, unchanged, against real processes that serve an encoder."""

import openai
import torch

from tests.e2e.servers import Server
from tests.engine.test_engine_embed import CLS, MEAN_POOLING, SEP, bert, expected, write


def test_an_encoder_behind_http(tmp_path):
    model = bert()
    folder = write(model, tmp_path / "tiny-encoder", MEAN_POOLING)
    texts = [" ".join(str(3 + (7 * i + j) % 150) for j in range(1 + 9 * i)) for i in range(6)]
    with (
        Server(str(folder), "--device", "cpu", "--cpu-threads", "1") as server,
        openai.OpenAI(base_url=server.base + "/v1", api_key="unused", max_retries=0, timeout=60) as client,
    ):
        answer = client.embeddings.create(model="tiny-encoder", input=texts)
        for text, item in zip(texts, answer.data, strict=True):
            ids = [CLS, *map(int, text.split()), SEP]
            torch.testing.assert_close(torch.tensor(item.embedding), expected(model, ids, "mean"), atol=1e-5, rtol=1e-5)
        assert answer.usage.total_tokens == sum(len(text.split()) + 2 for text in texts)
        assert any("no KV pages" in line for line in server.lines), server.lines
        try:
            client.completions.create(model="tiny-encoder", prompt="5")
        except openai.BadRequestError as error:
            assert "does not generate text" in str(error)
        else:
            raise AssertionError("an encoder generated")
        assert server.wait_until_idle() == (0, 0, 0)
        assert server.metric("vllm:request_success_total") == len(texts)
        assert server.terminate() == 0
