"""Records of the sampling kernels: eight numbers per row, so that all rows of a step are copied at once. Does not import
Triton: the host fills records whether or not a kernel reads them."""

# Columns of a float64 record. Integers are exact in it, and the uniform keeps its 53 bits.
SOURCE = 0  # row of the logits
TARGET = 1  # place of the token in the output
SCALE = 2  # log2(e) / temperature, so that a token's weight is 2 ** ((logit - largest) * scale); 0: greedy
REACH = 3  # largest distance below the largest logit of a token that is kept, by min-p or because it would have mass 0
TOP_K = 4  # vocabulary size: no limit
TOP_P = 5  # 1: no limit
FILTERED = 6  # 1: min-p or top-k apply, so that the mass of the kept tokens must be computed before top-p
UNIFORM = 7  # in [0, 1)
WIDTH = 8

# Columns of the record of a row with penalties, of the same WIDTH.
PENALTY_ROW = 0  # in the token table
PENALTY_SOURCE = 1  # the row of the logits
PROMPT_LEN = 2
LENGTH = 3  # tokens in the row, prompt and output
REPETITION = 4  # for tokens of prompt and output; 1: none
FREQUENCY = 5  # for tokens of the output, per occurrence
PRESENCE = 6  # for tokens of the output, once

# Masses are integers in units of 2**-40 of the likeliest token's weight: their sum does not depend on the order, so a
# row's token depends only on the row itself. A token of less than one unit is never drawn.
UNIT_BITS = 40
