"""RamSlots against a plain model: any order of calls, from threads that read and write as the mover's do."""

import random

from octavo.kv_tier.ram_slots import RamSlots


def test_any_order_of_calls_keeps_slots_and_what_is_read():
    for seed in range(60):
        dice = random.Random(seed)
        slots = RamSlots(dice.choice([0, 1, 5, 12]))
        holds: dict[bytes, int] = {}  # what must be there, from its own answers
        reading: list[tuple[list[bytes], list[int]]] = []
        reserved: list[list[int]] = []
        for _ in range(200):
            keys = [bytes([dice.randrange(10)]) for _ in range(dice.randrange(1, 5))]
            keys = list(dict.fromkeys(keys))
            match dice.choice(["reserve", "fill", "begin", "end", "clear"]):
                case "reserve":
                    got, dropped = slots.reserve(len(keys))
                    assert len(got) == len(set(got)) <= len(keys)
                    busy = {slot for _, these in reading for slot in these}
                    assert not busy & set(got), "a slot that is read is not given away"
                    for key in dropped:
                        holds.pop(key)
                    assert not set(got) & set(holds.values())
                    reserved.append(got)
                case "fill" if reserved:
                    got = reserved.pop(dice.randrange(len(reserved)))
                    keys = [bytes([value]) for value in dice.sample(range(10), min(len(got), 10))]
                    are_right = [dice.random() < 0.7 for _ in got]
                    stored = slots.fill(keys, got, are_right)
                    for key, slot, is_right in zip(keys, got, are_right, strict=True):
                        assert (key in stored) == (is_right and key not in holds)
                        if key in stored:
                            holds[key] = slot
                case "begin":
                    got = slots.begin_read(keys)
                    expected = next((at for at, key in enumerate(keys) if key not in holds), len(keys))
                    assert got == [holds[key] for key in keys[:expected]]
                    reading.append((keys[:expected], got))
                case "end" if reading:
                    slots.end_read(reading.pop(dice.randrange(len(reading)))[1])
                case "clear" if dice.random() < 0.2:
                    assert set(slots.clear()) == set(holds)
                    holds.clear()
            assert len(slots) == len(holds)
            assert slots.num_missing(keys) == next((at for at, key in enumerate(keys) if key in holds), len(keys))
        for _, got in reading:
            slots.end_read(got)
        for got in reserved:
            slots.fill([b"x"] * len(got), got, [False] * len(got))
        assert len(slots.reserve(100)[0]) == slots.num_slots, f"no slot is lost (seed {seed})"


def test_the_page_that_was_used_longest_ago_goes_first_and_a_prefix_from_its_end():
    slots = RamSlots(4)
    slots.fill([b"a", b"b", b"c", b"d"], slots.reserve(4)[0], [True] * 4)
    slots.end_read(slots.begin_read([b"a", b"b"]))
    assert slots.reserve(1)[1] == [b"c"]
    assert slots.reserve(2)[1] == [b"d", b"b"], "of what was read together, the head goes last"
