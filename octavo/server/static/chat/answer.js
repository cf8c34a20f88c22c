// What a stream's chunks make of a message: text, reasoning, tool calls, usage, and the odds of each token.
// Odds are kept until the page is closed: they are many times larger than the text.

const odds = new Map(); // id of a message → [{text, logprob, others: [[text, logprob]]}]
const MAX_ODDS = 200_000; // tokens of all messages together; the oldest are forgotten first
let numOdds = 0;

export const oddsOf = (id) => odds.get(id) ?? null;

export class Answer {
  constructor(node) {
    this.node = node;
    this.began = performance.now();
    this.firstAt = 0; // when the first piece came
    this.pieces = 0;
  }

  // Whether anything of an answer has come.
  get hasBegun() {
    return this.firstAt > 0;
  }

  take(chunk) {
    const { node } = this;
    if (chunk.usage) node.usage = { in: chunk.usage.prompt_tokens, out: chunk.usage.completion_tokens, cached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0 };
    if (chunk.model) node.model = chunk.model;
    for (const choice of chunk.choices || []) {
      const delta = choice.delta || {}, thought = delta.reasoning_content || delta.reasoning;
      if (thought || delta.content || delta.tool_calls) this.firstAt ||= performance.now();
      if (thought) node.thought = (node.thought || "") + thought;
      if (delta.content) {
        node.text += delta.content;
        this.pieces++;
        keepOdds(node.id, delta.content, choice.logprobs?.content);
      }
      for (const call of delta.tool_calls || []) this.call(call);
      if (choice.finish_reason) node.reason = choice.finish_reason;
    }
  }

  call(piece) {
    this.node.calls ??= [];
    const call = (this.node.calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (piece.id) call.id = piece.id;
    if (piece.function?.name) call.function.name = piece.function.name;
    if (piece.function?.arguments) call.function.arguments += piece.function.arguments;
  }

  // The answer is over: note its times.
  end() {
    const now = performance.now();
    if (!this.firstAt) return;
    const tokens = this.node.usage?.out ?? this.pieces;
    this.node.times = { first: (this.firstAt - this.began) / 1000, rate: tokens > 1 && now > this.firstAt ? ((tokens - 1) * 1000) / (now - this.firstAt) : null };
  }
}

function keepOdds(id, piece, tokens) {
  if (!tokens?.length) return;
  if (!odds.has(id)) odds.set(id, []);
  const kept = odds.get(id);
  // The tokens' texts add up to the piece, unless a character is split over several tokens: then the piece is right.
  const isWhole = tokens.map((token) => token.token).join("") === piece;
  for (const [place, token] of (isWhole ? tokens : tokens.slice(0, 1)).entries()) {
    kept.push({ text: isWhole ? token.token : place === 0 ? piece : "", logprob: token.logprob, others: (token.top_logprobs || []).filter((other) => other.token !== token.token).map((other) => [other.token, other.logprob]) });
    numOdds++;
  }
  while (numOdds > MAX_ODDS && odds.size > 1) {
    const [oldest, list] = odds.entries().next().value;
    odds.delete(oldest);
    numOdds -= list.length;
  }
}
