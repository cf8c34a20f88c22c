// An answer as it streams: the request is sent once, and a connection that breaks is taken up again where it was lost, also after
// the page was reloaded. Only this server's streams can be resumed (stream_options.resumable).

import { ask, events } from "../shared/common.js";

const PATIENCE_SECONDS = 50; // the server keeps a stream without a reader for --resume-seconds, 60 unless it is told otherwise
const RETRY_SECONDS = 1;

export class Stream {
  // `saved`: {id, next} of a stream that an earlier page has begun.
  constructor(request, saved = null) {
    this.request = request;
    this.id = saved?.id ?? "";
    this.next = saved?.next ?? 0; // the first event that was not taken yet
    this.requestId = "";
    this.controller = new AbortController();
    this.isStopped = false;
  }

  get saved() {
    return this.id ? { id: this.id, next: this.next } : null;
  }

  // Ends the answer, not only the connection.
  stop() {
    this.isStopped = true;
    this.controller.abort();
    if (this.id) ask(`/v1/stream/${encodeURIComponent(this.id)}`, { method: "DELETE", keepalive: true }).catch(() => {}); // it has ended meanwhile
  }

  // Chunks of the answer; `onLost` is called with true while the connection is away, and with false when it is back.
  async *chunks(onLost = () => {}) {
    let lostAt = 0;
    for (let isFirst = !this.id; ; isFirst = false) {
      try {
        const response = isFirst ? await this.begin() : await this.resume();
        if (lostAt) onLost(false);
        lostAt = 0;
        for await (const event of events(response)) {
          if (event.id !== null) this.next = event.id + 1;
          if (event.queue) yield { queue: event.queue };
          if (!event.data) continue;
          if (event.data === "[DONE]") return;
          const chunk = JSON.parse(event.data);
          if (chunk.error) throw Object.assign(new Error(chunk.error.message), { status: chunk.error.code ?? 500 });
          yield chunk;
        }
        throw new Error("the connection was closed before the answer was complete");
      } catch (error) {
        // An error of the server is an answer; anything else is a lost connection, which may come back.
        if (this.isStopped || error.status || !this.id) throw error;
        lostAt ||= Date.now();
        if (Date.now() - lostAt > PATIENCE_SECONDS * 1000) throw error;
        onLost(true);
        await new Promise((go) => setTimeout(go, RETRY_SECONDS * 1000));
      }
    }
  }

  async begin() {
    const resumable = { ...this.request, stream_options: { ...this.request.stream_options, resumable: true, include_queue: true } };
    let response;
    try {
      response = await this.post(resumable);
    } catch (error) {
      if (error.param !== "stream_options.resumable" && error.status !== 429) throw error;
      response = await this.post(this.request); // this server keeps no streams, or has no room for another
    }
    this.id = response.headers.get("x-stream-id") || "";
    this.requestId = response.headers.get("x-request-id") || "";
    return response;
  }

  post(body) {
    return ask("/v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: this.controller.signal });
  }

  resume() {
    return ask(`/v1/stream/${encodeURIComponent(this.id)}?from=${this.next}`, { signal: this.controller.signal });
  }
}
