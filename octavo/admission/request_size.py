"""Request size: bounds the sequences of one HTTP request, its prompts times its choices, and their tokens. What needs no token ids is
checked before prompts are tokenized."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.config import BudgetConfig
from octavo.errors import Field, InvalidRequest, Sentence

PROMPT, CHOICES, MAX_TOKENS = Field("prompt"), Field("n"), Field("max_tokens")


@dataclass(frozen=True, slots=True)
class RequestSize:
    """What a request asks for. Fields are those of the caller, for errors."""

    num_prompts: int
    num_choices: int  # sequences of each prompt: n, or best_of
    num_prompt_tokens: int = 0  # of all prompts; 0: not known yet
    num_output_tokens: int = 0  # the sum of every prompt's max_tokens
    max_tokens: int = 0  # the largest of them
    prompt_field: Field = PROMPT
    choices_field: Field = CHOICES
    max_tokens_field: Field = MAX_TOKENS

    def check(self, budget: BudgetConfig) -> None:
        """Raises InvalidRequest."""
        entries = f"{self.num_prompts} entries" if self.num_prompts > 1 else ""
        choices = [self.choices_field + f" is {self.num_choices}"] if self.num_choices > 1 else []
        num_sequences = self.num_prompts * self.num_choices
        if num_sequences > budget.max_request_sequences:
            prompts = [self.prompt_field + f" has {entries}"] if entries else []
            raise InvalidRequest(
                _listed([*prompts, *choices])
                + f", which makes {num_sequences} sequences; one request may have at most "
                f"{budget.max_request_sequences} (--max-request-sequences)"
            )
        num_tokens = self.num_choices * (self.num_prompt_tokens + self.num_output_tokens)
        if budget.max_request_tokens and num_tokens > budget.max_request_tokens:
            known = f"{self.num_prompt_tokens} tokens" if self.num_prompt_tokens else ""
            prompt = " in ".join(part for part in (known, entries) if part)
            prompts = [self.prompt_field + f" has {prompt}"] if prompt else []
            outputs = [self.max_tokens_field + f" is {self.max_tokens}"] if self.max_tokens else []
            raise InvalidRequest(
                _listed([*prompts, *choices, *outputs])
                + f", which may take {num_tokens} tokens in all; one request may take "
                f"at most {budget.max_request_tokens} (--max-request-tokens)"
            )


def _listed(clauses: Sequence[Sentence]) -> Sentence:
    """`a, b and c`."""
    listed = clauses[0]
    for number, clause in enumerate(clauses[1:], 2):
        listed = listed + (" and " if number == len(clauses) else ", ") + clause
    return listed
