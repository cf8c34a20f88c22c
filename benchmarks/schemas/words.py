"""Words and values that generated schemas are made of."""

import random
from typing import Any


def _words(text: str) -> list[str]:
    return text.split()


NOUNS = _words("""account address agent alert amount answer article asset author balance batch branch bucket build camera cart category
channel city client cluster color column comment company config contact container cost country course currency customer
dashboard dataset date department deployment device document domain driver email employee endpoint entry environment error
event expense feature field file filter flag folder function gateway group header host image index input instance interval
invoice item job key label language level license limit link list location log manager map measure member memory message
metric mode model module monitor name namespace network node note notification object offer option order output owner page
parameter parent partition password path payment period permission person phone pipeline plan player plugin point policy port
position price priority process product profile project property provider proxy query queue quota rate reason record region
release report repository request resource response result retry review role route rule runtime scale schedule scope score
script season secret section sensor server service session setting shard shipment shop signal site size snapshot source stage
state status step storage strategy stream subject subscription summary table tag target task team template tenant test theme
ticket time timeout title token topic total track transaction trigger type unit update upload url user value variable vendor
version view volume warehouse webhook weight widget window worker zone""")
ADJECTIVES = _words("""active allowed base custom default disabled display enabled external fixed global hidden initial internal last
local max min new next optional parent primary private public raw remote required secondary selected shared target total
valid""")
VERBS = _words("""create delete fetch find get list move open post publish read rename restart run schedule search send set start
stop summarize sync translate update upload validate watch write""")
SENTENCES = (
    "The {noun} of this {other}.",
    "Whether the {noun} is used by the {other}. Leave it out to keep the default.",
    "Name of the {noun}, as shown to users.",
    "Identifies the {noun}. Must be unique within its {other}.",
    "Optional {noun}; see the manual of the {other} for what it does.",
    "How long to wait for the {noun} before the {other} is given up, in seconds.",
    "List of {noun}s that belong to the {other}.",
)
PATTERNS = (
    "^[a-z][a-z0-9-]*$", "^[A-Z]{2}$", "^[A-Z]{3}$", "^[a-zA-Z0-9_]+$", "^\\d{4}-\\d{2}-\\d{2}$", "^#[0-9a-fA-F]{6}$",
    "^[0-9]+(\\.[0-9]+){1,2}$", "^v?\\d+\\.\\d+\\.\\d+(-[a-z0-9.]+)?$", "^[^\\s]+$", "^\\S+@\\S+$", "^https?://", "\\.(json|ya?ml)$",
    "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)$", "^[0-9]{5}(-[0-9]{4})?$", "^\\+?[0-9]{7,15}$", "^[a-f0-9]{24}$", "^(true|false|auto)$",
    "^/[a-z0-9/_-]*$", "^[A-Za-z0-9+/]+={0,2}$", "^.*[A-Z].*$", "^arn:aws:[a-z0-9-]+:", "^[^/]+/[^/]+$", "^\\$\\{.+\\}$",
    "^[\\w.-]+$", "^(\\d+)(ms|s|m|h|d)$", "^[01]?\\d-[A-Z][a-z]{2}$",
)  # fmt: skip
KNOWN_FORMATS = ("date-time", "date", "time", "email", "uri", "uuid", "hostname", "ipv4", "ipv6")
OTHER_FORMATS = ("int32", "int64", "double", "float", "password", "byte", "binary", "color", "phone", "uri-template", "regex",
                 "decimal", "markdown", "uri-reference", "iri", "json-pointer", "url", "bcp47", "timezone")  # fmt: skip


class Source:
    """A stream of choices that depends on its seed alone."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, choices: Any) -> Any:
        return self.rng.choice(choices)

    def count(self, least: int, most: int) -> int:
        return self.rng.randint(least, most)

    def some(self, choices: Any, least: int, most: int) -> list[Any]:
        choices = list(choices)
        return self.rng.sample(choices, min(len(choices), self.count(least, most)))

    def name(self, case: str = "snake") -> str:
        parts = [self.pick(NOUNS)]
        if self.chance(0.45):
            parts.insert(0, self.pick(ADJECTIVES))
        elif self.chance(0.3):
            parts.append(self.pick(("id", "name", "url", "count", "type", "at", "key")))
        match case:
            case "camel":
                return parts[0] + "".join(map(str.title, parts[1:]))
            case "pascal":
                return "".join(map(str.title, parts))
            case "kebab":
                return "-".join(parts)
            case _:
                return "_".join(parts)

    def names(self, number: int, case: str = "snake") -> list[str]:
        found: dict[str, None] = {}
        while len(found) < number:
            name = self.name(case)
            found[name if name not in found else f"{name}{len(found)}"] = None
        return list(found)

    def text(self) -> str:
        return self.pick(SENTENCES).format(noun=self.pick(NOUNS), other=self.pick(NOUNS))

    def values(self, least: int = 2, most: int = 7) -> list[str]:
        return self.some(NOUNS, least, most)
