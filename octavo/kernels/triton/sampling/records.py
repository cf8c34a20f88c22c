"""What the sampling kernels are told of a row, as eight numbers side by side, so that a step's rows travel in one copy.
Knows nothing of Triton: the host fills records whether or not a kernel will ever read them."""

# Columns of a float64 record. Whole numbers stay exact in it, and the uniform keeps its 53 bits.
SOURCE = 0  # the row of the logits
TARGET = 1  # the place of its token in the output
SCALE = 2  # log2(e) / temperature, so that a token weighs 2 ** ((logit - largest) * scale); 0: greedy
REACH = 3  # how far below the largest a logit may lie to be kept, by min-p or because it weighs nothing
TOP_K = 4  # the vocabulary's size: no limit
TOP_P = 5  # 1: no limit
FILTERED = 6  # 1: min-p or top-k apply, so that what is kept must be weighed again before top-p
UNIFORM = 7  # in [0, 1)
WIDTH = 8

# Columns of the record of a row with penalties, as wide.
PENALTY_ROW = 0  # in the token table
PENALTY_SOURCE = 1  # the row of the logits
PROMPT_LEN = 2
LENGTH = 3  # tokens that the row holds, prompt and output
REPETITION = 4  # counts prompt and output; 1: none
FREQUENCY = 5  # counts output, as often as it occurs
PRESENCE = 6  # counts output, once

# Masses are whole numbers of 2**-40 of the likeliest token's weight: added in any order they give the same sum, so a
# token depends on nothing but its own row. A token that weighs less than one such unit is never drawn.
UNIT_BITS = 40
