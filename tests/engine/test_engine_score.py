"""LLM.score and LLM.classify against transformers."""

from pathlib import Path

import pytest

from octavo import LLM
from octavo.errors import InvalidRequest, Unsupported
from tests.engine.test_engine_embed import CLS, MEAN_POOLING, SEP, bert, expected, write
from tests.server.test_server_scoring import DOCUMENTS, QUERY, cross_encoder, logits, pair


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_cross_encoder(num_ranks: int, tmp_path: Path) -> None:
    model, folder = cross_encoder(tmp_path / "model")
    with LLM(str(folder), device="cpu", cpu_threads=1, tensor_parallel_size=num_ranks) as llm:
        assert llm.report.num_labels == 1
        found = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        for text, each in zip(DOCUMENTS, found, strict=True):
            ids, second_at = pair(QUERY, text)
            assert each.prompt_token_ids == ids
            assert each.outputs.score == pytest.approx(float(logits(model, ids, second_at).sigmoid()), abs=1e-5)
        (plain,) = llm.classify([[CLS, 7, SEP]], use_activation=False, use_tqdm=False)
        assert plain.outputs.probs == pytest.approx(logits(model, [CLS, 7, SEP]).tolist(), abs=1e-5)
        with pytest.raises(InvalidRequest, match="data_1 has 2 texts and data_2 3"):
            llm.score(["7", "8"], ["7", "8", "9"])
        with pytest.raises(InvalidRequest, match="data_2 is empty"):
            llm.score("7", [])


def test_an_embedding_model(tmp_path: Path) -> None:
    model = bert()
    with LLM(str(write(model, tmp_path / "model", MEAN_POOLING)), device="cpu", cpu_threads=1) as llm:
        query, *others = (expected(model, [CLS, *map(int, text.split()), SEP], "mean") for text in (QUERY, *DOCUMENTS))
        found = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        assert [each.score for each in found] == pytest.approx([float(query @ other) for other in others], abs=1e-5)
        with pytest.raises(Unsupported, match="no classification head"):
            llm.classify("7")
