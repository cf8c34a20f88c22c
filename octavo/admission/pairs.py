"""Scores and labels: the pooling by a classification head, and prompts of pairs of texts. The server and the offline API use them."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from octavo.admission.validate import choose_pooling
from octavo.errors import ContextTooLong, Field, InvalidRequest, Unsupported
from octavo.messages import EngineReport, PoolingParams
from octavo.text import Text


@dataclass(frozen=True, slots=True)
class Texts:
    """One side of the pairs, and where it came from."""

    texts: Sequence[str]
    names: Sequence[str]  # field of each text, for errors

    @classmethod
    def of(cls, given: str | Sequence[str], name: str) -> "Texts":
        """One text, or several, that came in the field `name`. Raises InvalidRequest."""
        if isinstance(given, str):
            return cls([given], [name])
        if not isinstance(given, Sequence) or not all(isinstance(text, str) for text in given):
            raise InvalidRequest(f"{name} must be a string or a list of strings; only text can be scored", param=name)
        if not given:
            raise InvalidRequest(f"{name} is empty: at least one text is needed", param=name)
        return cls(given, [f"{name}[{at}]" for at in range(len(given))])

    @property
    def field(self) -> Field:
        return Field(self.names[0].partition("[")[0])


def check_sides(firsts: Texts, seconds: Texts) -> None:
    """Raise InvalidRequest unless there is one of the first for all of the second, or as many of both."""
    if len(firsts.texts) not in (1, len(seconds.texts)):
        raise InvalidRequest(
            f"{firsts.field} has {len(firsts.texts)} texts and {seconds.field} {len(seconds.texts)}: there must be one of the first "
            "for all of the second, or as many of both",
            param=str(firsts.field),
        )


def score_pooling(text: Text, report: EngineReport, use_activation: bool | None) -> PoolingParams:
    """Pooling for scores: the head of a classifier with one label, or vectors of length 1. Raises Unsupported for other classifiers."""
    if report.num_labels > 1:
        raise Unsupported(
            f"this model is a classifier with {report.num_labels} labels: scores are of models with one label, and of embedding models; "
            "POST /classify gives its labels"
        )
    if report.num_labels:
        return classification(text, report, use_activation)
    return choose_pooling(text.pooling_config, report, normalize=True)


def classification(text: Text, report: EngineReport, use_activation: bool | None) -> PoolingParams:
    """Pooling by the model's classification head. Raises Unsupported if it has none."""
    if not report.num_labels:
        raise Unsupported(
            "this model has no classification head: serve a sequence classifier, or use POST /v1/embeddings"
        )
    activation = "none" if use_activation is False else text.classifier_config.activation_for(report.num_labels)
    return PoolingParams("classify", normalize=False, activation=activation)


@dataclass(frozen=True, slots=True)
class PairPrompts:
    """Makes the prompts of texts that are scored: pairs for a cross-encoder, single texts for a model that embeds. `cut`: tokens to which a
    prompt is cut; None: one that has more than `longest` is refused."""

    text: Text
    pooling: PoolingParams
    longest: int
    cut: int | None

    def pairs(
        self, firsts: Texts, seconds: Texts, most_first: int = 0, most_second: int = 0
    ) -> list[tuple[str, list[int], PoolingParams]]:
        """(field, ids, pooling) of each pair of texts. `most_first`, `most_second`: tokens of a text that are kept; 0: all."""
        _ = self.text.pair_form  # raises before anything is encoded
        heads = [self._part(text, name, most_first) for text, name in zip(firsts.texts, firsts.names, strict=True)]
        found = []
        for at, (text, name) in enumerate(zip(seconds.texts, seconds.names, strict=True)):
            one = 0 if len(heads) == 1 else at
            ids, second_at = self.text.join_pair(heads[one], self._part(text, name, most_second), self.cut)
            if len(ids) > self.longest:
                raise ContextTooLong(
                    Field(name)
                    + f" and {firsts.names[one]} have {len(ids)} tokens together; at most {self.longest} fit: set "
                    "truncate_prompt_tokens to -1 to have them cut"
                )
            found.append((name, ids, msgspec.structs.replace(self.pooling, second_at=second_at)))
        return found

    def alone(self, texts: Texts, most: int = 0) -> list[tuple[str, list[int], PoolingParams]]:
        """(field, ids, pooling) of each text."""
        found = []
        for text, name in zip(texts.texts, texts.names, strict=True):
            if not text:
                raise InvalidRequest(Field(name) + " is empty: at least one token is needed")
            if most or self.cut is not None:
                ids = self.text.encode_cut(text, min(most or self.longest, self.cut or self.longest), param=name)
            else:
                ids = self.text.encode(text, param=name, max_tokens=self.longest)
            found.append((name, ids, self.pooling))
        return found

    def _part(self, text: str, name: str, most: int) -> list[int]:
        is_cut = bool(most) or self.cut is not None
        return self.text.encode_part(text, most or self.longest, param=name, is_cut=is_cut)


def dot(a: list[float], b: list[float]) -> float:
    return float(sum(map(operator.mul, a, b)))
