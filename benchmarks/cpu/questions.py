"""First questions of a newcomer, answered greedily: how many of 48 answers have the right word, with packed weights, with float32, or by
the server at --url (llama.cpp's with the same file, for instance). It measures what rounding costs in answers; perplexity.py does in loss.

    python -m benchmarks.cpu.questions [--model FILE] [--url http://HOST:PORT]"""

import argparse
import re
import sys
import time
from typing import Any

from octavo import LLM, SamplingParams
from octavo.cli.chat import RemoteModel

MAX_TOKENS = 24
VARIANTS: dict[str, dict[str, Any]] = {"as in the file": {}, "float32": {"dtype": "float32"}}
QUESTIONS = (  # and a pattern of the right answers
    ("What is the capital of France?", "Paris"),
    ("What is the capital of Italy?", "Rome"),
    ("What is the capital of Germany?", "Berlin"),
    ("What is the capital of Spain?", "Madrid"),
    ("What is the capital of Japan?", "Tokyo"),
    ("What is the capital of China?", "Beijing"),
    ("What is the capital of Russia?", "Moscow"),
    ("What is the capital of England?", "London"),
    ("What is the capital of Portugal?", "Lisbon"),
    ("What is the capital of Greece?", "Athens"),
    ("What is the capital of Egypt?", "Cairo"),
    ("What is the capital of Canada?", "Ottawa"),
    ("What's the capital of France?", "Paris"),
    ("Name the capital of France.", "Paris"),
    ("Tell me the capital of France.", "Paris"),
    ("capital of france", "Paris"),
    ("Which city is the capital of France?", "Paris"),
    ("What is 2+2?", "4"),
    ("What is 1 + 1?", "2"),
    ("What is 5 times 3?", "15"),
    ("What color is the sky?", "blue"),
    ("What colour is grass?", "green"),
    ("How many days are in a week?", "seven|7"),
    ("How many months are in a year?", "12|twelve"),
    ("How many legs does a spider have?", "eight|8"),
    ("Who wrote Romeo and Juliet?", "Shakespeare"),
    ("Who painted the Mona Lisa?", "Vinci"),
    ("What is the largest planet in the solar system?", "Jupiter"),
    ("What is the largest ocean?", "Pacific"),
    ("What is H2O?", "water"),
    ("At what temperature does water boil?", "100|212"),
    ("What is the opposite of hot?", "cold"),
    ("Who was the first president of the United States?", "Washington"),
    ("What language is spoken in Brazil?", "Portuguese"),
    ("What do bees make?", "honey"),
    ("What is the chemical symbol for gold?", "Au"),
    ("How many continents are there?", "seven|7"),
    ("What planet do we live on?", "Earth"),
    ("What is the tallest mountain in the world?", "Everest"),
    ("Which animal is known as the king of the jungle?", "lion"),
    ("What is the square root of 16?", "4|four"),
    ("Is the earth flat?", "no|round|spher"),
    ("Translate 'hello' to French.", "bonjour"),
    ("Translate 'thank you' to Spanish.", "gracias"),
    ("Say hello.", "hello"),
    ("Who are you?", "SmolLM"),
    ("What is your name?", "SmolLM"),
    ("What is the currency of Japan?", "yen"),
)


def is_right(answer: str, pattern: str) -> bool:
    return re.search(rf"\b(?:{pattern})", answer, re.IGNORECASE) is not None


def ask_here(options: dict[str, Any]) -> tuple[list[str], float]:
    """Return the answers, and the CPU seconds that they took."""
    with LLM(**options) as llm:
        begun = time.process_time()
        talks = [[{"role": "user", "content": question}] for question, _ in QUESTIONS]
        outputs = llm.chat(talks, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
        return [output.outputs[0].text for output in outputs], time.process_time() - begun


def ask_server(url: str) -> list[str]:
    model = RemoteModel(url, "", "", {"temperature": 0, "max_tokens": MAX_TOKENS})
    return ["".join(model.chat([{"role": "user", "content": question}])) for question, _ in QUESTIONS]


def show(name: str, answers: list[str], note: str = "") -> None:
    right = [is_right(answer, pattern) for answer, (_, pattern) in zip(answers, QUESTIONS, strict=True)]
    print(f"{name}: {sum(right)} of {len(QUESTIONS)} right{note}")
    for (question, _), answer, was_right in zip(QUESTIONS, answers, right, strict=True):
        print(f"  {'right' if was_right else 'WRONG'}  {question}  {' '.join(answer.split())}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.questions", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--model", default="", metavar="FILE", help="GGUF file or folder (default: the embedded model)")
    parser.add_argument("--url", default="", metavar="URL", help="ask this OpenAI-compatible server instead")
    arguments = parser.parse_args()
    if arguments.url:
        show(arguments.url, ask_server(arguments.url))
        return 0
    for name, options in VARIANTS.items():
        answers, seconds = ask_here({"model": arguments.model, **options})
        show(name, answers, f", {seconds:.2f} CPU seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
